"""largest: the elementwise maximum of a tensor over the ranks of a group."""

from __future__ import annotations

import torch

import opjit
import opjit.distributed


# begin: declare
@opjit.op("demo::largest(Tensor x, str group) -> Tensor")
def largest(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@largest.reference
def reference(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.stack(opjit.distributed.gathered(x, group)).amax(0)
    # end: declare


@largest.samples
def samples(device):
    group = opjit.distributed.peers(device=device)
    for size in (0, 1, 1000):
        x = torch.sin(torch.arange(size, device=device, dtype=torch.float32) + group.rank)
        yield (x, group.name), {}

"""gather_multiply: all_gather(x) @ w in one launch, for bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import opjit
import opjit.distributed


@opjit.op(
    "demo::gather_multiply(Tensor x, Tensor w, str group) -> Tensor",
    archs=["sm_90a"],
    differentiable=False,
)
def gather_multiply(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape[0] * opjit.distributed.world_size(group), w.shape[1])


@gather_multiply.reference
def reference(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    rows = torch.cat(opjit.distributed.gathered(x, group))
    return (rows.float() @ w.float()).to(x.dtype)


@gather_multiply.samples
def samples(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    group = opjit.distributed.peers(device=device, bytes=1 << 20)
    for m, n, k in ((128, 256, 64), (256, 512, 192)):
        generator = torch.Generator().manual_seed(k + group.rank)
        x = torch.randint(-3, 4, (m, k), generator=generator).to(device, torch.bfloat16)
        w = torch.randint(-3, 4, (n, k), generator=generator).to(device, torch.bfloat16).t()
        yield x, w, group.name

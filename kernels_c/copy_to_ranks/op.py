"""copy_to_ranks: a copy of x, and in the backward the sum of the ranks' gradients.

It is the beginning of a tensor-parallel layer: each rank multiplies x by a part of the weights, so the gradient of x has a part on each
rank. `all_reduce_ranks(x, group, sum_gradients=False)` is the end of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit

TAKEN = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
)


@opjit.op("copy_to_ranks(Tensor x, str group) -> Tensor")
def copy_to_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    torch._check(
        x.dtype in TAKEN,
        lambda: (
            f"copy_to_ranks takes float16, bfloat16, float32, float64, int32 or int64, not {x.dtype}"
        ),
    )
    return x.new_empty(x.shape)


@copy_to_ranks.reference
def reference(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@copy_to_ranks.setup_context
def setup_context(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


@copy_to_ranks.backward
def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.opjit.all_reduce_ranks(grad, ctx.group), None


@copy_to_ranks.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    group = opjit.distributed.peers(device=device)
    for dtype in TAKEN:
        for shape in ((), (0,), (7,), (129, 33)):
            yield (torch.randn(shape, device=device).to(dtype), group.name), {}
        x = torch.randn(12, 10, 9, device=device).to(dtype)
        yield (x.transpose(0, 2), group.name), {}
        yield (x[1::3, ::2, 3:8], group.name), {}


@copy_to_ranks.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    group = opjit.distributed.peers(device=device)
    x = torch.randn(1 << 22, device=device)
    yield opjit.Workload("float32 16 MB", (x, group.name), {}, 2 * x.nbytes)

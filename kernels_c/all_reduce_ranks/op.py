"""all_reduce_ranks: the sum of a tensor over the ranks of a group, the same bits on every rank.

`allreduce`, the op of a similar name, sums the elements of one tensor and needs no ranks. This one is a collective, as NCCL's all-reduce:
every rank of `group` calls it with a tensor of the same sizes and dtype, and gets the elementwise sum. Call
`opjit.distributed.peers(group)` once before; the op's `group` is the name of what that returns. `all_reduce_ranks_` writes `x`.

float16 and bfloat16 are added in float32, in the order of the ranks, and rounded once.

If every rank computes its own loss, the gradient of x is the sum of the ranks' gradients, which is the default. In a tensor-parallel layer,
all ranks compute the same loss from the sum. Then pass `sum_gradients=False`, and begin the layer with `copy_to_ranks`.
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


def _check(x: torch.Tensor, op: str) -> None:
    torch._check(
        x.dtype in TAKEN,
        lambda: f"{op} takes float16, bfloat16, float32, float64, int32 or int64, not {x.dtype}",
    )


@opjit.op("all_reduce_ranks(Tensor x, str group, bool sum_gradients=True) -> Tensor")
def all_reduce_ranks(x: torch.Tensor, group: str, sum_gradients: bool = True) -> torch.Tensor:
    _check(x, "all_reduce_ranks")
    return x.new_empty(x.shape)


@opjit.op("all_reduce_ranks_(Tensor(a!) x, str group) -> ()")
def all_reduce_ranks_(x: torch.Tensor, group: str) -> None:
    _check(x, "all_reduce_ranks_")


@all_reduce_ranks.reference
def reference(x: torch.Tensor, group: str, sum_gradients: bool = True) -> torch.Tensor:
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    parts = opjit.distributed.gathered(x, group)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(x.dtype).contiguous()


@all_reduce_ranks_.reference
def in_place_reference(x: torch.Tensor, group: str) -> None:
    x.copy_(reference(x, group))


@all_reduce_ranks.setup_context
def setup_context(ctx: Any, inputs: tuple[torch.Tensor, str, bool], output: torch.Tensor) -> None:
    _, ctx.group, ctx.sum_gradients = inputs


@all_reduce_ranks.backward
def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """The gradient of the sum or, with a loss for each rank, the sum of their gradients, because x is in every rank's result."""
    return all_reduce_ranks(grad, ctx.group) if ctx.sum_gradients else grad, None, None


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: str, rank: int) -> torch.Tensor:
    values = torch.arange(1, 1 + torch.Size(shape).numel(), device=device, dtype=torch.float64)
    return (torch.sin(values + rank) * 50).to(dtype).reshape(shape)


@all_reduce_ranks.samples
@all_reduce_ranks_.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each rank has other numbers; in a process that is not in a job, the group has one rank."""
    group = opjit.distributed.peers(device=device)
    for dtype in TAKEN:
        for shape in ((), (0,), (1,), (7,), (3, 0, 2), (129, 33), (70_001,)):
            yield (_filled(shape, dtype, device, group.rank), group.name), {}
        x = _filled((12, 10, 9), dtype, device, group.rank)
        yield (x.transpose(0, 2), group.name), {}
        yield (x[1::3, ::2, 3:8], group.name), {}
        yield (x.flatten()[1:], group.name), {}
    x = _filled((300_000,), torch.float32, device, group.rank)
    yield (x, group.name), {}  # more than a buffer holds at once


@all_reduce_ranks.workloads
@all_reduce_ranks_.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    group = opjit.distributed.peers(device=device)
    for dtype in (torch.float32, torch.bfloat16):
        for power in (10, 13, 15, 17, 19, 21, 23, 25):
            x = torch.randn((1 << power) // dtype.itemsize, device=device).to(dtype)
            name = f"{str(dtype).removeprefix('torch.')} {(1 << power) // 1024} KB"
            yield opjit.Workload(name, (x, group.name), {}, 2 * x.numel() * x.element_size())

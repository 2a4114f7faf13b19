"""all_gather_ranks, all_to_all_ranks and reduce_scatter_ranks: tensors that the ranks of a group exchange along the first dimension.

All ranks of `group` call an op with tensors of the same sizes and dtype. Call `opjit.distributed.peers(group)` once before.

- all_gather_ranks: the ranks' tensors, one behind the other.
- all_to_all_ranks: of each rank's tensor the part of this rank, one behind the other.
- reduce_scatter_ranks: this rank's part of the sum, added in the order of the ranks, float16 and bfloat16 in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit

SUMMED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
)


def _part(x: torch.Tensor, world: int) -> int:
    torch._check(
        x.dim() > 0 and x.shape[0] % world == 0,
        lambda: (
            f"the first size of {tuple(x.shape)} must be a multiple of {world}, the number of ranks"
        ),
    )
    return x.shape[0] // world


@opjit.op("all_gather_ranks(Tensor x, str group) -> Tensor")
def all_gather_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    torch._check(x.dim() > 0, lambda: "all_gather_ranks takes a tensor with a first dimension")
    return x.new_empty((x.shape[0] * opjit.distributed.world_size(group), *x.shape[1:]))


@opjit.op("all_to_all_ranks(Tensor x, str group) -> Tensor")
def all_to_all_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    _part(x, opjit.distributed.world_size(group))
    return x.new_empty(x.shape)


@opjit.op("reduce_scatter_ranks(Tensor x, str group) -> Tensor")
def reduce_scatter_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    torch._check(x.dtype in SUMMED, lambda: f"reduce_scatter_ranks does not add {x.dtype}")
    return x.new_empty((_part(x, opjit.distributed.world_size(group)), *x.shape[1:]))


def _parts(x: torch.Tensor, group: str) -> list[torch.Tensor]:
    """This rank's part of each rank's tensor."""
    ranks = opjit.distributed.gathered(x, group)
    size = _part(x, len(ranks))
    rank = opjit.distributed.rank_in(group)
    return [part[rank * size : (rank + 1) * size] for part in ranks]


@all_gather_ranks.reference
def gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.cat(opjit.distributed.gathered(x, group)).contiguous()


@all_to_all_ranks.reference
def exchanged(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.cat(_parts(x, group)).contiguous()


@reduce_scatter_ranks.reference
def summed(x: torch.Tensor, group: str) -> torch.Tensor:
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    parts = [part.to(wide) for part in _parts(x, group)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype).contiguous()


def _context(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


for _op in (all_gather_ranks, all_to_all_ranks, reduce_scatter_ranks):
    _op.setup_context(_context)


@all_gather_ranks.backward
def gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    if not grad.is_complex():
        return reduce_scatter_ranks(grad, ctx.group), None
    parts = torch.view_as_real(grad.resolve_conj())
    return torch.view_as_complex(reduce_scatter_ranks(parts, ctx.group)), None


@all_to_all_ranks.backward
def exchange_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return all_to_all_ranks(grad, ctx.group), None


@reduce_scatter_ranks.backward
def scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return all_gather_ranks(grad, ctx.group), None


@all_gather_ranks.samples
@all_to_all_ranks.samples
@reduce_scatter_ranks.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    group = opjit.distributed.peers(device=device)
    for dtype in SUMMED:
        for rows, columns in ((0, 3), (1, 1), (2, 7), (3, 33), (5, 20_001)):
            count = rows * columns * group.world
            values = torch.sin(torch.arange(count, device=device, dtype=torch.float64) + group.rank)
            x = (values * 50).to(dtype).reshape(rows * group.world, columns)
            yield (x, group.name), {}
            yield (x.t().contiguous().t(), group.name), {}


@all_gather_ranks.workloads
@all_to_all_ranks.workloads
@reduce_scatter_ranks.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    group = opjit.distributed.peers(device=device)
    for power in (10, 15, 17, 20, 23, 25):
        x = torch.randn(group.world, (1 << power) // 4 // group.world, device=device)
        yield opjit.Workload(f"float32 {(1 << power) // 1024} KB", (x, group.name), {}, 1 << power)

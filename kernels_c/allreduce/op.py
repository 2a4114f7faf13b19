"""allreduce: the sum of all elements, with torch.sum's dtype rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit

INTEGRAL = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TAKEN = (*INTEGRAL, *FLOATING)


@opjit.op("allreduce(Tensor x, *, ScalarType? dtype=None) -> Tensor")
def allreduce(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    natural = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64
    result = natural if dtype is None else dtype
    torch._check(
        x.dtype in TAKEN and result in TAKEN,
        lambda: (
            f"allreduce takes and gives bool, integers and real floating dtypes, not {x.dtype} to {result}"
        ),
    )
    return x.new_empty((), dtype=result)


allreduce.reference(torch.sum)


@allreduce.setup_context
def setup_context(
    ctx: Any, inputs: tuple[torch.Tensor], keyword_only_inputs: dict[str, Any], output: torch.Tensor
) -> None:
    ctx.shape = inputs[0].shape
    ctx.dtype = inputs[0].dtype


@allreduce.backward
def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Every element counts once: the gradient is the result's, expanded without a copy."""
    return grad.to(ctx.dtype).expand(ctx.shape)


@allreduce.sharding
def sharding(x: Any, *, dtype: torch.dtype | None = None) -> list[tuple[list[Any], list[Any]]]:
    """Each process sums its shard; the sum of these sums is the result, except for bool, whose sum is `any`."""
    partial = [torch.distributed.tensor.Partial()]
    whole = [torch.distributed.tensor.Replicate()]
    shards = [(partial, [torch.distributed.tensor.Shard(dim)]) for dim in range(x.ndim)]
    return [(whole, whole), *(shards if dtype is not torch.bool else [])]


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    values = torch.arange(1, 1 + torch.Size(shape).numel(), device=device, dtype=torch.float64)
    values = (torch.sin(values) * 50).trunc() / 4
    values = values if dtype.is_floating_point or dtype.is_signed else values.abs()
    return values.to(dtype).reshape(shape)


@allreduce.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for dtype in (*INTEGRAL, *FLOATING):
        for shape in ((), (0,), (1,), (7,), (3, 0, 2), (129, 33), (70_001,)):
            yield (_filled(shape, dtype, device),), {}
        x = _filled((34, 20, 18), dtype, device)
        yield (x.transpose(0, 2),), {}
        yield (x[1::3, ::2, 3:11],), {}
        yield (x[0].expand(5, 20, 18),), {}
        yield (x.flatten()[1:],), {}
    x = _filled((1000,), torch.float32, device)
    for dtype in (torch.float64, torch.float16, torch.int32, torch.bool):
        yield (x,), {"dtype": dtype}
    for source in (torch.bool, torch.int8, torch.int64):
        yield (_filled((1000,), source, device),), {"dtype": torch.float32}


@allreduce.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ):
        for power in (10, 12, 14, 16, 18, 19, 20, 21, 22, 24, 26, 28):
            x = torch.randint(0, 2, (1 << power,), device=device, dtype=torch.int8).to(dtype)
            x = (
                x
                if not dtype.is_floating_point
                else torch.randn(1 << power, device=device).to(dtype)
            )
            yield opjit.Workload(
                f"{str(dtype).removeprefix('torch.')} 2^{power}",
                (x,),
                {},
                x.numel() * x.element_size(),
            )

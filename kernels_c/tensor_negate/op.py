"""tensor_negate: -x, as torch.neg. The op.py has the shape function; tensor_negate.c and .cu have the kernel functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit

INTEGRAL = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATING = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
# torch itself negates no wide unsigned ones
TAKEN = (*INTEGRAL, *FLOATING, torch.uint16, torch.uint32, torch.uint64)


@opjit.op("tensor_negate(Tensor x) -> Tensor", elementwise=True)
def tensor_negate(x: torch.Tensor) -> torch.Tensor:
    torch._check(
        x.dtype in TAKEN,
        lambda: (
            f"tensor_negate takes integers, floating and complex dtypes, not {x.dtype}"
            f"{'; ~x inverts a bool tensor' if x.dtype == torch.bool else ''}"
        ),
    )
    return torch.empty_like(x)


tensor_negate.reference(torch.neg)


@tensor_negate.backward
def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return torch.neg(grad)


@tensor_negate.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for dtype in (*INTEGRAL, *FLOATING):
        for shape in ((), (0,), (1,), (7,), (3, 0, 2), (129, 33)):
            yield (_numbers(shape, dtype, device),), {}
        x = _numbers((2, 3, 5, 4), dtype, device)
        for view in (
            x.transpose(0, 3),
            x[:, ::2, 1:],
            x[0].expand(3, 3, 5, 4),
            x.flatten()[1:],
            x.to(memory_format=torch.channels_last),
        ):
            yield (view,), {}
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38], device=device
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield (special.to(dtype),), {}
    yield (_numbers((40_001,), torch.float32, device),), {}  # more than one thread's share


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    values = (
        torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float64)
        .sub_(5)
        .mul_(0.75)
    )
    return (values if dtype.is_signed else values.abs()).to(dtype).reshape(shape)


@tensor_negate.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int8,
        torch.int64,
    ):
        for power in (12, 16, 20, 24, 26):
            x = torch.randint(-9, 10, (1 << power,), device=device, dtype=torch.int8).to(dtype)
            yield opjit.Workload(
                f"{str(dtype).removeprefix('torch.')} 2^{power}",
                (x,),
                {},
                2 * x.numel() * x.element_size(),
            )

"""add_custom: self + other, as torch.add; and add_custom_backward, which autograd calls for the gradients of both.

Sizes broadcast and dtypes are promoted as torch.add's, and operands are converted to the result's dtype before they are added.
The result lies like the first operand of its sizes (torch.empty_like), and is contiguous where neither has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit

INTEGRAL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
# torch itself adds no wide unsigned ones
TAKEN = (*INTEGRAL, *FLOATING, *COMPLEX, torch.uint16, torch.uint32, torch.uint64)


@opjit.op("add_custom(Tensor self, Tensor other) -> Tensor", elementwise=True)
def add_custom(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    torch._check(
        self.dtype in TAKEN and other.dtype in TAKEN,
        lambda: (
            f"add_custom takes bool, integers, floating and complex dtypes, not {self.dtype} and {other.dtype}"
        ),
    )
    dtype = torch.result_type(self, other)
    sizes = torch.broadcast_shapes(self.shape, other.shape)
    torch._check(
        self.dtype == other.dtype or not dtype.is_complex,
        lambda: (
            f"add_custom takes two complex tensors of one dtype, not {self.dtype} and {other.dtype}; convert one of them with .to()"
        ),
    )
    for like in (self, other):
        if _same(like.shape, sizes):
            return torch.empty_like(like, dtype=dtype)
    return self.new_empty(sizes, dtype=dtype)


def _same(one: torch.Size, other: torch.Size) -> bool:
    """Surely so: where only data tell whether a size is 1, it is another. To ask would be an error while a graph is made."""
    return len(one) == len(other) and all(_surely(a == b) for a, b in zip(one, other, strict=True))


def _surely(equal: bool | torch.SymBool) -> bool:
    if isinstance(equal, bool):
        return equal
    # The module is slow to import, and is there already where this is reached.
    return torch.fx.experimental.symbolic_shapes.guard_or_false(equal)


add_custom.reference(torch.add)


@add_custom.setup_context
def setup_context(
    ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor
) -> None:
    ctx.inputs = [(each.shape, each.dtype) for each in inputs]


@add_custom.backward
def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Copies of the gradient, summed if an input was broadcast, and converted if it has another dtype."""
    alike = all(_same(shape, grad.shape) and dtype == grad.dtype for shape, dtype in ctx.inputs)
    if alike and all(ctx.needs_input_grad):
        copies: tuple[torch.Tensor, ...] = add_custom_backward(grad)
        return copies
    return tuple(
        _reduced(grad, *each) if needed else None
        for each, needed in zip(ctx.inputs, ctx.needs_input_grad, strict=True)
    )


def _reduced(grad: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    more = grad.dim() - len(shape)
    repeated = [
        d
        for d, size in enumerate(grad.shape)
        if d < more or (_surely(shape[d - more] == 1) and not _surely(size == 1))
    ]
    summed = (
        grad.sum(repeated, keepdim=True)[(0,) * more] if repeated else grad
    )  # sum_to_size asks about sizes that only data tell
    return summed if summed.dtype == dtype else summed.to(dtype)


@add_custom.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for dtype in (*INTEGRAL, *FLOATING, *COMPLEX):
        for shape in ((), (0,), (1,), (7,), (3, 0, 2), (129, 33)):
            yield (_numbers(shape, dtype, device), _numbers(shape, dtype, device, 3)), {}
        x = _numbers((2, 3, 5, 4), dtype, device)
        y = _numbers((2, 3, 5, 4), dtype, device, 3)
        last = torch.channels_last
        for pair in (
            (x.transpose(0, 3), y.transpose(0, 3)),
            (x.transpose(1, 2), y.reshape(2, 5, 3, 4)),
            (x[:, ::2, 1:], y[:, ::2, 1:]),
            (x.flatten()[1:], y.flatten()[:-1]),
            (x.to(memory_format=last), y.to(memory_format=last)),
            (x.to(memory_format=last), y),
            (x[0].expand(2, 3, 5, 4), y),
        ):
            yield pair, {}
    sizes: tuple[tuple[int, ...], ...] = (
        (),
        (1,),
        (4,),
        (5, 1),
        (3, 1, 4),
        (2, 1, 1, 1),
        (7, 1, 1, 1, 1),
        (0, 1, 1, 1, 1),
    )
    for dtype in (torch.int32, torch.float16, torch.float64):
        x = _numbers((2, 3, 5, 4), dtype, device)
        for size in sizes:
            y = _numbers(size, dtype, device, 3)
            yield (x, y), {}
            yield (y, x.to(memory_format=torch.channels_last)), {}
        yield (x[:, :, :1, ::2], x[:, :1, :, 1::2]), {}
    for one, two in (
        (torch.int8, torch.uint8),
        (torch.bool, torch.int64),
        (torch.int64, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.int32, torch.float32),
    ):
        x = _numbers((9, 70), one, device)
        y = _numbers((9, 70), two, device, 3)
        for pair in ((x, y), (y, x), (x.t(), y.t()), (x, y[0, 0]), (x[0, 0], y), (x[:, :1], y[:1])):
            yield pair, {}
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38], device=device
    )
    for dtype in FLOATING:
        yield (special.to(dtype), special.to(dtype)[:, None]), {}
    yield (
        (_numbers((40_001,), torch.float32, device), _numbers((40_001,), torch.float32, device, 3)),
        {},
    )  # more than a thread's share


def _numbers(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, first: int = -5
) -> torch.Tensor:
    values = (
        torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float64)
        .add_(first)
        .mul_(0.75)
    )
    return (values if dtype.is_signed else values.abs()).to(dtype).reshape(shape)


@add_custom.workloads
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
            x, y = (
                torch.randint(-9, 10, (1 << power,), device=device, dtype=torch.int8).to(dtype)
                for _ in range(2)
            )
            yield opjit.Workload(
                f"{str(dtype).removeprefix('torch.')} 2^{power}",
                (x, y),
                {},
                3 * x.numel() * x.element_size(),
            )


@opjit.op(
    "add_custom_backward(Tensor grad) -> (Tensor grad_self, Tensor grad_other)", elementwise=True
)
def add_custom_backward(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch._check(
        grad.dtype in TAKEN,
        lambda: "add_custom_backward takes bool, integers, floating and complex dtypes",
    )
    return torch.empty_like(grad), torch.empty_like(grad)


@add_custom_backward.reference
def clones(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad.clone(), grad.clone()


@add_custom_backward.backward
def add_up(ctx: Any, grad_self: torch.Tensor, grad_other: torch.Tensor) -> torch.Tensor:
    return grad_self + grad_other


@add_custom_backward.samples
def gradients(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for dtype in (*INTEGRAL, *FLOATING, *COMPLEX):
        x = _numbers((2, 3, 5, 4), dtype, device)
        for view in (
            x,
            x[0, 0, 0, 0],
            x[:0],
            x.transpose(0, 3),
            x[:, ::2, 1:],
            x[0].expand(2, 3, 5, 4),
            x.flatten()[1:],
        ):
            yield (view,), {}


@add_custom_backward.workloads
def copying(device: str) -> Iterator[opjit.Workload]:
    for power in (12, 16, 20, 24, 26):
        x = torch.randn(1 << power, device=device)
        yield opjit.Workload(f"float32 2^{power}", (x,), {}, 3 * x.numel() * x.element_size())

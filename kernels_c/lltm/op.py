"""The LLTM cell (an LSTM without a forget gate, with an elu): lltm_forward and lltm_backward.

For a batch of B rows, F features and S states; ``weights`` is (3S, S + F) with the columns of ``old_h`` first, ``bias`` is (3S)::

    z0, z1, z2 = [old_h, x] @ weights.T + bias
    i, o, g = sigmoid(z0), sigmoid(z1), elu(z2)
    new_cell = old_cell + g * i
    new_h = tanh(new_cell) * o

``gates`` is (B, 4S): i, o, g and tanh(new_cell), for the backward. float32 and float64. There is no second derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import opjit

Tensor = torch.Tensor


@opjit.op(
    "lltm_forward(Tensor x, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell)"
    " -> (Tensor new_h, Tensor new_cell, Tensor gates)"
)
def lltm_forward(
    x: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, features, state = _sizes("lltm_forward", x, old_h)
    _check(
        "lltm_forward",
        x,
        old_h,
        old_h=(old_h, batch, state),
        weights=(weights, 3 * state, state + features),
        bias=(bias, 3 * state),
        old_cell=(old_cell, batch, state),
    )
    return x.new_empty(batch, state), x.new_empty(batch, state), x.new_empty(batch, 4 * state)


# The gradients go to C++ without Python. `gates` has no gradient, as no argument here has the name grad_gates.
@lltm_forward.backward
@opjit.op(
    "lltm_backward(Tensor? grad_new_h, Tensor? grad_new_cell, Tensor gates, Tensor x, Tensor weights, Tensor old_h,"
    " bool[] output_mask)"
    " -> (Tensor grad_x, Tensor grad_weights, Tensor grad_bias, Tensor grad_old_h, Tensor grad_old_cell)"
)
def lltm_backward(
    grad_new_h: Tensor | None,
    grad_new_cell: Tensor | None,
    gates: Tensor,
    x: Tensor,
    weights: Tensor,
    old_h: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``output_mask`` selects gradients; those not wanted can come back without elements. None for a gradient means zeros."""
    batch, features, state = _sizes("lltm_backward", x, old_h)
    _check(
        "lltm_backward",
        x,
        old_h,
        old_h=(old_h, batch, state),
        weights=(weights, 3 * state, state + features),
        gates=(gates, batch, 4 * state),
        grad_new_h=(grad_new_h, batch, state),
        grad_new_cell=(grad_new_cell, batch, state),
    )
    inputs, parameters = _wanted(output_mask)

    def wanted(of: bool, *sizes: int) -> Tensor:
        return x.new_empty(sizes if of else (0,) * len(sizes))

    return (
        wanted(inputs, batch, features),
        wanted(parameters, 3 * state, state + features),
        wanted(parameters, 3 * state),
        wanted(inputs, batch, state),
        x.new_empty(batch, state),
    )


def _wanted(output_mask: list[bool]) -> tuple[bool, bool]:
    """Return whether a gradient of an input, and one of a parameter, is needed: those of a pair come together."""
    torch._check(
        len(output_mask) == 5,
        lambda: f"lltm_backward: `output_mask` must have 5 elements, not {len(output_mask)}",
    )
    x, weights, bias, old_h, _ = output_mask
    return x or old_h, weights or bias


def _sizes(op: str, x: Tensor, old_h: Tensor) -> tuple[int, int, int]:
    """Check as lltm.h does, for calls that are traced, and return batch, features and states."""
    torch._check(
        x.dtype in (torch.float32, torch.float64),
        lambda: f"{op} takes float32 and float64, not {x.dtype}",
    )
    torch._check(
        x.dim() == old_h.dim() == 2,
        lambda: f"{op}: `x` and `old_h` must have 2 dimensions, not {x.dim()} and {old_h.dim()}",
    )
    return x.shape[0], x.shape[1], old_h.shape[1]


def _check(op: str, x: Tensor, states: Tensor, /, **others: tuple[Any, ...]) -> None:
    """Check the dtypes and sizes of the other arguments; each is a tensor or None with its sizes."""
    for name, (one, *sizes) in others.items():
        if one is not None:
            _check_one(op, name, one, sizes, x, states)


def _check_one(
    op: str, name: str, one: Tensor, sizes: list[int], x: Tensor, states: Tensor
) -> None:
    torch._check(
        one.dtype == x.dtype,
        lambda: (
            f"{op}: `{name}` is {one.dtype}, but `x` is {x.dtype}; convert one of them with .to()"
        ),
    )
    torch._check(
        one.dim() == len(sizes),
        lambda: (
            f"{op}: `{name}` must have {len(sizes)} dimension{'s' * (len(sizes) > 1)}, not {one.dim()}"
        ),
    )
    for found, size, d in zip(one.shape, sizes, range(2), strict=False):
        torch._check(
            found == size,
            partial(_wrong_size, op, f"dimension {d} of `{name}`", found, size, x, states),
        )


def _wrong_size(op: str, what: str, found: int, size: int, x: Tensor, states: Tensor) -> str:
    batch, features = x.shape
    return (
        f"{op}: {what} is {found}, but must be {size} for a batch of {batch}, {features} features (`x`) and "
        f"{states.shape[1]} states (`old_h`)"
    )


@lltm_forward.reference
def forward_reference(
    x: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    z = torch.nn.functional.linear(torch.cat([old_h, x], dim=1), weights, bias)
    i, o, g = z.chunk(3, dim=1)
    i = torch.sigmoid(i)
    o = torch.sigmoid(o)
    g = torch.nn.functional.elu(g)
    new_cell = old_cell + g * i
    t = torch.tanh(new_cell)
    return t * o, new_cell, torch.cat([i, o, g, t], dim=1)


@lltm_backward.reference
def backward_reference(
    grad_new_h: Tensor | None,
    grad_new_cell: Tensor | None,
    gates: Tensor,
    x: Tensor,
    weights: Tensor,
    old_h: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs, parameters = _wanted(output_mask)
    state = old_h.shape[1]
    i, o, g, t = gates.chunk(4, dim=1)
    d_h = torch.zeros_like(t) if grad_new_h is None else grad_new_h
    d_cell = d_h * o * (1 - t * t) + (0 if grad_new_cell is None else grad_new_cell)
    d_z = torch.cat(
        [
            d_cell * g * i * (1 - i),
            d_h * t * o * (1 - o),
            d_cell * i * torch.where(g > 0, 1, g + 1),
        ],
        dim=1,
    )
    d_x = d_z @ weights if inputs else weights.new_empty(0, 0)
    d_weights = d_z.t() @ torch.cat([old_h, x], dim=1) if parameters else weights.new_empty(0, 0)
    d_bias = d_z.sum(0) if parameters else weights.new_empty(0)
    return d_x[:, state:].contiguous(), d_weights, d_bias, d_x[:, :state].contiguous(), d_cell


def _numbers(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Between -2 and 2, the same on every device."""
    return 2 * torch.sin(
        torch.arange(1, 1 + torch.Size(shape).numel(), device=device, dtype=torch.float64) ** 1.5
    ).to(dtype).reshape(shape)


def _arguments(
    batch: int, features: int, state: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    def numbers(*shape: int) -> Tensor:
        return _numbers(*shape, dtype=dtype, device=device)

    return (
        numbers(batch, features),
        numbers(3 * state, state + features) / max(1, state + features) ** 0.5,
        numbers(3 * state),
        numbers(batch, state),
        numbers(batch, state),
    )


def _apart(x: Tensor) -> Tensor:
    """The same numbers, column by column in memory, with gaps between them."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7.0)
    wide = wide.t().contiguous().t() if x.dim() == 2 else wide
    return wide[..., ::2].copy_(x)


SHAPES = (
    (16, 32, 128),
    (1, 1, 1),
    (1, 32, 128),
    (3, 5, 7),
    (17, 33, 65),
    (40, 3, 31),
    (2, 130, 4),
    (0, 3, 5),
    (2, 0, 5),
    (2, 3, 0),
)


@lltm_forward.samples
def forward_samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for dtype in (torch.float32, torch.float64):
        for shape in SHAPES:
            yield _arguments(*shape, dtype, device), {}
        yield tuple(_apart(x) for x in _arguments(3, 5, 7, dtype, device)), {}
        yield (
            tuple(
                x.double().to(dtype)[..., 1:] if x.dim() == 1 else x[:, 1:]
                for x in (
                    x.new_zeros(*x.shape[:-1], x.shape[-1] + 1).index_copy(
                        -1, torch.arange(1, x.shape[-1] + 1, device=device), x
                    )
                    for x in _arguments(17, 33, 65, dtype, device)
                )
            ),
            {},
        )


@lltm_backward.samples
def backward_samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for (x, weights, bias, old_h, old_cell), _ in forward_samples(device):
        gates = forward_reference(x, weights, bias, old_h, old_cell)[2]
        grad_h = old_cell.flip(0)
        grad_cell = old_h.flip(1) / 2
        yield (grad_h, grad_cell, gates, x, weights, old_h, [True] * 5), {}
    yield (grad_h, None, gates, x, weights, old_h, [True, False, False, False, True]), {}
    yield (None, grad_cell, gates, x, weights, old_h, [False, False, True, False, False]), {}
    yield (grad_h.new_ones(()).expand_as(grad_h), None, gates, x, weights, old_h, [False] * 5), {}


WORK = ((16, 32, 128), (64, 128, 512))


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@lltm_forward.workloads
def forward_workloads(device: str) -> Iterator[opjit.Workload]:
    for batch, features, state in WORK:
        args = _arguments(batch, features, state, torch.float32, device)
        yield opjit.Workload(
            f"B{batch} F{features} S{state}", args, {}, _bytes(*args) + 6 * _bytes(args[-1])
        )


@lltm_backward.workloads
def backward_workloads(device: str) -> Iterator[opjit.Workload]:
    for batch, features, state in WORK:
        x, weights, bias, old_h, old_cell = _arguments(
            batch, features, state, torch.float32, device
        )
        gates = forward_reference(x, weights, bias, old_h, old_cell)[2]
        args = (old_cell.flip(0), old_cell, gates, x, weights, old_h, [True] * 5)
        yield opjit.Workload(
            f"B{batch} F{features} S{state}",
            args,
            {},
            _bytes(*args[:6], x, weights, bias, old_h, old_cell),
        )

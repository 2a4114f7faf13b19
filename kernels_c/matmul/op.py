"""matmul: a matrix product with bias, activation and residual in one op.

For ``x`` (M, K), ``w`` (K, N), such as ``linear.weight.t()``, and ``bias`` (N)::

    z = x @ w + bias
    out = activation(z) + residual

``epilogue`` selects the activation: "none", "relu", "gelu" (with erf), or "silu_multiply", where N is 2F, the activation is
``silu(z[:, :F]) * z[:, F:]``, and the result has F columns. float16 and bfloat16 in all tensors, added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import opjit

Tensor = torch.Tensor
TAKEN = (torch.float16, torch.bfloat16)
EPILOGUES = ("none", "relu", "gelu", "silu_multiply")


@opjit.op(
    "matmul(Tensor x, Tensor w, Tensor? bias=None, Tensor? residual=None, *, str epilogue='none') -> Tensor",
    archs=["sm_90a"],
)
def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    epilogue: str = "none",
) -> Tensor:
    """Check as matmul.h does, for calls that are traced."""
    torch._check(x.dtype in TAKEN, lambda: f"matmul takes float16 and bfloat16, not {x.dtype}")
    torch._check(
        x.dim() == w.dim() == 2,
        lambda: f"matmul: `x` and `w` must have 2 dimensions, not {x.dim()} and {w.dim()}",
    )
    torch._check(
        epilogue in EPILOGUES,
        lambda: (
            f"matmul: `epilogue` must be none, relu, gelu or silu_multiply, not {epilogue[:40]}"
        ),
    )
    rows, columns = x.shape[0], w.shape[1]
    _check("w", w, (x.shape[1], columns), x, w)
    _check("bias", bias, (columns,), x, w)
    if epilogue == "silu_multiply":
        torch._check(
            columns % 2 == 0,
            lambda: (
                f"matmul: `w` must have an even number of columns for silu_multiply, not {columns}"
            ),
        )
        columns = columns // 2
    _check("residual", residual, (rows, columns), x, w)
    return x.new_empty(rows, columns)


def _check(name: str, one: Tensor | None, sizes: tuple[int, ...], x: Tensor, w: Tensor) -> None:
    if one is None:
        return
    torch._check(
        one.dtype == x.dtype,
        lambda: (
            f"matmul: `{name}` is {one.dtype}, but `x` is {x.dtype}; convert one of them with .to()"
        ),
    )
    torch._check(
        one.dim() == len(sizes),
        lambda: (
            f"matmul: `{name}` must have {len(sizes)} dimension{'s' * (len(sizes) > 1)}, not {one.dim()}"
        ),
    )
    for d, (found, size) in enumerate(zip(one.shape, sizes, strict=True)):
        told = partial(_wrong_size, f"dimension {d} of `{name}`", found, size, x, w)
        torch._check(found == size, told)


def _wrong_size(what: str, found: int, size: int, x: Tensor, w: Tensor) -> str:
    of_x = f"({x.shape[0]}, {x.shape[1]})"
    of_w = f"({w.shape[0]}, {w.shape[1]})"
    return f"matmul: {what} is {found}, but must be {size} for `x` {of_x} and `w` {of_w}"


@matmul.reference
def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    epilogue: str = "none",
) -> Tensor:
    z = x.float() @ w.float()
    if bias is not None:
        z = z + bias.float()
    out = _activated(z, epilogue)
    if residual is not None:
        out = out + residual.float()
    return out.to(x.dtype)


def _activated(z: Tensor, epilogue: str) -> Tensor:
    if epilogue == "relu":
        return torch.relu(z)
    if epilogue == "gelu":
        return 0.5 * z * (1 + torch.erf(z * 0.5**0.5))  # torch's gelu of infinity is NaN on the CPU
    if epilogue == "silu_multiply":
        gate, up = z.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up
    return z


@matmul.setup_context
def setup_context(
    ctx: Any,
    inputs: tuple[Tensor | None, ...],
    keyword_only_inputs: dict[str, Any],
    output: Tensor,
) -> None:
    x, w, bias, *_ = (*inputs, None, None)  # torch drops arguments that equal their defaults
    ctx.epilogue = keyword_only_inputs["epilogue"]
    ctx.save_for_backward(x, w, bias if ctx.epilogue != "none" else None)


@matmul.backward
def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute z again, because saving it would need the memory that the epilogue saves."""
    x, w, bias = ctx.saved_tensors
    needed = [*ctx.needs_input_grad, False, False]
    d_z = grad
    if ctx.epilogue != "none" and any(needed[:3]):
        z = x @ w if bias is None else torch.addmm(bias, x, w)
        d_z = _gradient_of_z(grad.float(), z.float(), ctx.epilogue).to(grad.dtype)
    return (
        d_z @ w.t() if needed[0] else None,
        x.t() @ d_z if needed[1] else None,
        d_z.sum(0) if needed[2] else None,
        grad if needed[3] else None,
    )


def _gradient_of_z(grad: Tensor, z: Tensor, epilogue: str) -> Tensor:
    if epilogue == "relu":
        return torch.where(z <= 0, 0, grad)
    if epilogue == "gelu":
        d_z: Tensor = torch.ops.aten.gelu_backward(grad, z)
        return d_z
    gate, up = z.chunk(2, dim=1)
    d_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat([d_gate, grad * torch.nn.functional.silu(gate)], dim=1)


@matmul.sharding
def sharding(
    x: Any, w: Any, bias: Any = None, residual: Any = None, *, epilogue: str = "none"
) -> list[tuple[list[Any], list[Any]]]:
    """Rows of x, columns of w except for silu_multiply, and for a plain product also the depth."""

    def placed(out: Any, *arguments: Any) -> tuple[list[Any], list[Any]]:
        given = zip((x, w, bias, residual), arguments, strict=True)
        return [out], [None if one is None else placement for one, placement in given]

    whole = torch.distributed.tensor.Replicate()
    by_rows = torch.distributed.tensor.Shard(0)
    by_columns = torch.distributed.tensor.Shard(1)
    found = [
        placed(whole, whole, whole, whole, whole),
        placed(by_rows, by_rows, whole, whole, by_rows),
    ]
    if epilogue != "silu_multiply":
        found.append(placed(by_columns, whole, by_columns, by_rows, by_columns))
    if epilogue == "none" and bias is None and residual is None:
        partial_sums = torch.distributed.tensor.Partial()
        found.append(placed(partial_sums, by_columns, by_rows, None, None))
    return found


def _numbers(*shape: int, dtype: torch.dtype, device: str, first: int = 1) -> Tensor:
    """Between -1 and 1, the same on every device."""
    count = torch.Size(shape).numel()
    steps = torch.arange(first, first + count, device=device, dtype=torch.float64)
    return torch.sin(steps**1.5).to(dtype).reshape(shape)


def _arguments(
    rows: int, depth: int, columns: int, epilogue: str, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """x, w, bias and residual; w is the transpose of a layer's weight."""
    numbers = partial(_numbers, dtype=dtype, device=device)
    results = columns // 2 if epilogue == "silu_multiply" else columns
    w = numbers(columns, depth, first=5).t() / max(1, depth) ** 0.5
    return numbers(rows, depth), w, numbers(columns, first=3), numbers(rows, results, first=7)


def _apart(x: Tensor) -> Tensor:
    """The same numbers, column by column in memory, with gaps between them, from an odd element on."""
    wide = x.new_full((*(2 * size + 1 for size in x.shape),), 7.0)
    wide = wide.t().contiguous().t() if x.dim() == 2 else wide
    return wide[(slice(1, None, 2),) * x.dim()].copy_(x)


SHAPES = (
    (65, 33, 130),
    (1, 64, 64),
    (5, 1, 6),
    (7, 9, 2),
    (1, 1, 2),
    (16, 20, 12),
    (0, 4, 6),
    (4, 0, 6),
    (4, 6, 0),
    (64, 256, 128),
    (129, 300, 258),
)


@matmul.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for dtype in TAKEN:
        for epilogue in EPILOGUES:
            named = {"epilogue": epilogue}
            for shape in SHAPES:
                yield _arguments(*shape, epilogue, dtype, device), named
            x, w, bias, residual = _arguments(17, 41, 38, epilogue, dtype, device)
            yield (x, w), named
            yield (x, w.contiguous(), bias), named
            yield (x.t().contiguous().t(), w, None, residual), named
            yield tuple(map(_apart, (x, w, bias, residual))), named
            yield (x[:, 1:], w[1:], bias, residual), named
        x, w, bias, residual = _arguments(33, 7, 1, "none", dtype, device)
        yield (x, w, bias, residual), {}
        yield (x[:1].expand(9, 7), w.expand(7, 5), bias.expand(5)), {}


@matmul.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    """A layer of a language model: decoding, prefill, and the first layer of a gated feed-forward network."""
    width, hidden, most = (4096, 14336, 2048) if device == "cuda" else (1024, 3584, 512)
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (1, 16, 64, 512, 2048):
            if rows <= most:
                yield _workload(rows, width, width, "none", dtype, device)
                yield _workload(rows, width, 2 * hidden, "silu_multiply", dtype, device)
    for epilogue in ("relu", "gelu"):
        yield _workload(most, width, width, epilogue, torch.bfloat16, device)


def _workload(
    rows: int, depth: int, columns: int, epilogue: str, dtype: torch.dtype, device: str
) -> opjit.Workload:
    x = torch.randn(rows, depth, device=device, dtype=dtype)
    w = torch.randn(columns, depth, device=device, dtype=dtype).t() / depth**0.5
    results = columns // 2 if epilogue == "silu_multiply" else columns
    return opjit.Workload(
        f"{str(dtype).removeprefix('torch.')} {epilogue} M{rows} K{depth} N{columns}",
        (x, w),
        {"epilogue": epilogue},
        x.element_size() * (x.numel() + w.numel() + rows * results),
        2 * rows * depth * columns,
    )

"""Run the corpus of CUDA extensions on CPU tensors, emulated, and compare each call with torch's own operators.

OPJIT_EMULATE=1 python -m tests.emulate.extensions [NAME ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import opjit
from opjit.errors import CompileError, NoKernel
from tests.cpp_extension.corpus.calls import cuda
from tests.cpp_extension.corpus.program import Program, scope


def _lltm(x: Any, weights: Any, bias: Any, old_h: Any, old_cell: Any) -> list[Any]:
    joined = torch.cat([old_h, x], 1)
    gates = torch.addmm(bias, joined, weights.t()).reshape(len(x), 3, -1)
    cell = old_cell + functional.elu(gates[:, 2]) * gates[:, 0].sigmoid()
    return [cell.tanh() * gates[:, 1].sigmoid(), cell, joined, gates]


def _layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> list[Any]:
    mean = x.mean(1)
    rstd = (x.var(1, unbiased=False) + eps).rsqrt()
    return [(x - mean[:, None]) * rstd[:, None] * weight + bias, mean, rstd]


def _blur(x: Any, weights: Any) -> Any:
    padded = functional.pad(x.reshape(-1), (1, 1))
    left, middle, right = weights
    return (padded[:-2] * left + padded[1:-1] * middle + padded[2:] * right).reshape(x.shape)


def _grayscale(image: Any) -> Any:
    red, green, blue = image.float().unbind(-1)
    return (0.21 * red + 0.71 * green + 0.07 * blue).byte()[..., None]


def _pool(x: Any, kernel: int, stride: int) -> Any:
    return (
        functional.max_pool1d(x.reshape(1, -1, x.shape[-1]).float(), kernel, stride)
        .reshape(*x.shape[:-1], -1)
        .to(x)
    )


def _backward(grad: Any, y: Any) -> tuple[Any, Any]:
    masked = grad * (y > 0)
    return masked, masked.sum(0)


def _relu_(x: Any) -> None:
    x.relu_()


# What each function of the corpus computes.
REFERENCES: dict[str, Callable[..., Any]] = {
    "elementwise_add_cuda": torch.add,
    "relu_cuda": torch.relu,
    "relu_cuda_": _relu_,
    "gelu": functional.gelu,
    "add_half2": torch.add,
    "scale": torch.mul,
    "matmul_cuda": torch.matmul,
    "matmul_tiled": torch.matmul,
    "softmax_cuda": lambda x: x.softmax(1),
    "sum_cuda": torch.sum,
    "layer_norm": _layer_norm,
    "rms_norm": lambda x, w, eps: x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * w,
    "fill": torch.full_like,
    "transpose_cuda": torch.t,
    "forward": _lltm,
    "conv2d_cuda": functional.conv2d,
    "cumsum_cuda": lambda x: x.cumsum(1),
    "histogram": lambda x, bins: torch.histc(x[(x >= 0) & (x < bins)].float(), bins, 0, bins).int(),
    "blur": _blur,
    "copy_vectorized": lambda x: x * 2,
    "square": torch.square,
    "shift": torch.add,
    "attention": functional.scaled_dot_product_attention,
    "rgb_to_grayscale": _grayscale,
    "square_matrix": torch.square,
    "fused": lambda x, bias, scale, relu: (
        ((x + bias) * scale).relu() if relu else (x + bias) * scale
    ),
    "backward": _backward,
    "cross_entropy": functional.cross_entropy,
    "max_pool1d": _pool,
    "block_sums": lambda x: (
        functional.pad(x.reshape(-1), (0, -x.numel() % 32)).reshape(-1, 32).sum(1)
    ),
    "negate": torch.neg,
}


class _References:
    """A module whose functions are torch's."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return REFERENCES[name]
        except KeyError:
            raise AttributeError(name) from None


def outcome(program: Program) -> str:
    """Return ``right``, or how a program of the corpus fails when it is emulated."""
    try:
        module = opjit.load_inline(
            program.identifier, program.source, program.cuda_source, functions=program.functions
        )
    except (NoKernel, CompileError) as error:
        return f"not emulated: {error}"
    for call in program.calls:
        if "__doc__" in call:
            continue
        expected = eval(call, {**scope(), "m": _References()})
        try:
            found = eval(call, {**scope(), "m": module})
            found = list(found) if isinstance(found, tuple) else found
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
        except (RuntimeError, AssertionError) as error:
            return f"wrong: {call}: {error}"
    return "right"


def main(names: list[str]) -> int:
    """Print the outcome of each program. Returns the number of those that are not right."""
    chosen = [each for each in cuda.PROGRAMS if not names or each.name in names]
    failures = 0
    for program in chosen:
        found = outcome(program)
        failures += found != "right"
        print(f"{program.name} (emulated): {found}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

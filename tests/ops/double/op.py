"""Twice a tensor; keeps its strides, and has a backward."""

from collections.abc import Iterator
from typing import Any

import torch

import opjit


@opjit.op("optest::double(Tensor x) -> Tensor")
def double(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@double.reference
def reference(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.setup_context
def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    return None


@double.backward
def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return 2 * grad


@double.samples
def samples(device: str) -> Iterator[tuple[tuple[torch.Tensor], dict[str, Any]]]:
    for dtype in (torch.float32, torch.float64):
        x = torch.arange(24, dtype=dtype, device=device).reshape(2, 3, 4)
        for view in (
            x,
            x.permute(2, 0, 1),
            x[:, ::2, 1:],
            x[0, 0, 0],
            x[:0],
            x[:, :1].expand(2, 3, 4),
        ):
            yield (view,), {}

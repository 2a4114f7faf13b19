"""caffe::round: a rounding layer with a straight-through gradient, on CUDA, with an unchanged kernel of Caffe.

    opjit get examples/06_from_caffe/round/ --arch sm_90
    opjit test examples/06_from_caffe/round/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit


@opjit.op("caffe::round(Tensor x) -> Tensor")
def round_op(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@round_op.reference
def reference(x: torch.Tensor) -> torch.Tensor:
    return (x > 0.5).to(x.dtype)


@round_op.backward
def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


@round_op.samples
def samples(device: str) -> Iterator[tuple[tuple[torch.Tensor], dict[str, Any]]]:
    for shape in ((), (0,), (1,), (7,), (33, 65)):
        yield (torch.linspace(-0.5, 1.5, torch.Size(shape).numel(), device=device).reshape(shape),), {}

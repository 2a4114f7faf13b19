"""scale_inplace: multiply a tensor by a number, in place; the mutating op of call.py."""

from __future__ import annotations

import torch

import opjit


@opjit.op("opjit_bench::scale_inplace(Tensor(a!) x, float a) -> ()")
def scale_inplace(x: torch.Tensor, a: float) -> None:
    pass

"""The op of bandwidth.py: reads a tensor on a GPU and keeps nothing."""

from __future__ import annotations

import torch

import opjit


@opjit.op("opjit_bench::read16(Tensor x) -> Tensor")
def read16(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.int32)

"""The ops of floors.py: one that only reads, and one that only multiplies."""

from __future__ import annotations

import torch

import opjit


@opjit.op("opjit_bench::read(Tensor x) -> Tensor")
def read(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(())


@opjit.op("opjit_bench::multiply_add(Tensor x, int count) -> (Tensor, Tensor)")
def multiply_add(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)

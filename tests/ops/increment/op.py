"""Adds one to every element, in place."""

from __future__ import annotations

import torch

import opjit


@opjit.op("optest::increment(Tensor(a!) x) -> ()")
def increment(x: torch.Tensor) -> None:
    return None

"""Adds one to every element, in place."""

import torch

import opjit


@opjit.op("optest::increment(Tensor(a!) x) -> ()")
def increment(x: torch.Tensor) -> None:
    return None

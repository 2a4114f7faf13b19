"""Calls that an op must refuse, in a sentence that names it."""

from __future__ import annotations

import torch

from opjit.checks.check import Check, add, expect_sentence
from opjit.op import Op
from opjit.samples import Sample, Skipped, kinds, outcome

CHECKS: list[Check] = []


def _refusal(op: Op, sample: Sample) -> str:
    """The message of a call that the op must refuse."""
    try:
        outcome(op.overload, op, sample)
    except RuntimeError as error:
        return expect_sentence(op, error, sample)
    raise AssertionError(f"on ({sample}) the op is expected to raise a RuntimeError, and gives a result")


def _with_dimensions(op: Op, device: str) -> Sample:
    return kinds(op, device, 1, lambda sample: all(t.dim() for t in sample.tensors()))[0]


@add(CHECKS, "two devices")
def _two_devices(op: Op, device: str) -> str:
    """Tensors on two devices are refused in a sentence."""
    sample = _with_dimensions(op, device)
    if len(sample.tensors()) < 2:
        raise Skipped("the op takes one tensor")
    for index, tensor in enumerate(sample.tensors()):
        for other in ("meta", "cpu" if device == "cuda" else "meta"):
            told = _refusal(op, sample.replace(index, tensor.to(other)))
            assert "expected all tensors on one device" in told, f"two devices are refused with {told!r}"
    return "refused in a sentence"


@add(CHECKS, "sparse")
def _sparse(op: Op, device: str) -> str:
    """A sparse tensor is refused in a sentence."""
    sample = _with_dimensions(op, device)
    for index, tensor in enumerate(sample.tensors()):
        told = _refusal(op, sample.replace(index, torch.zeros_like(tensor).to_sparse()))
        assert "takes dense tensors" in told, f"a sparse tensor is refused with {told!r}"
    return "refused in a sentence"


@add(CHECKS, "float8")
def _float8(op: Op, device: str) -> str:
    """A dtype without arithmetic is refused in a sentence."""
    for sample in kinds(op, device, 1, lambda sample: sample.numel > 0):
        for index, tensor in enumerate(sample.tensors()):
            _refusal(op, sample.replace(index, torch.zeros_like(tensor, dtype=torch.float8_e4m3fn)))
    return "refused in a sentence"

"""Calls that an op must reject, with a one-line error that names it."""

from __future__ import annotations

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample
from opjit.testing.checks import Check, add, expect_one_line
from opjit.testing.samples import Skipped, distinct_samples, effects
from opjit.testing.trials import trials

CHECKS: list[Check] = []
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _refusal(op: Op, sample: Sample) -> str:
    """The error message of a call that the op must reject."""
    try:
        effects(op.overload, op, sample)
    except RuntimeError as error:
        return expect_one_line(op, error, sample)
    raise AssertionError(f"on ({sample}) the op must raise a RuntimeError, but it returns a result")


def _with_dimensions(op: Op, device: str) -> Sample:
    return distinct_samples(op, device, 1, lambda sample: all(t.dim() for t in sample.tensors()))[0]


@add(CHECKS, "two devices")
def _two_devices(op: Op, device: str) -> str:
    """Tensors on two devices raise a one-line error."""
    sample = _with_dimensions(op, device)
    if len(sample.tensors()) < 2:
        raise Skipped("the op takes one tensor")
    others = ("meta", "cpu") if device == "cuda" else ("meta",)
    for call in trials(sample.replace(index, tensor.to(other), f"tensor {index} on {other}")
                       for index, tensor in enumerate(sample.tensors()) for other in others):
        message = _refusal(op, call)
        assert "expected all tensors on one device" in message, f"on tensors of two devices the op says {message!r}"
    return "rejected with a one-line error"


@add(CHECKS, "sparse")
def _sparse(op: Op, device: str) -> str:
    """A sparse tensor raises a one-line error."""
    sample = _with_dimensions(op, device)
    for call in trials(sample.replace(index, _all_zero(t), f"tensor {index} sparse")
                       for index, t in enumerate(sample.tensors())):
        message = _refusal(op, call)
        assert "takes dense tensors" in message, f"on a sparse tensor the op says {message!r}"
    return "rejected with a one-line error"


def _all_zero(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of these sizes."""
    places = torch.zeros(tensor.dim(), 0, dtype=torch.int64, device=tensor.device)
    return torch.sparse_coo_tensor(places, tensor.new_empty(0), tensor.shape, check_invariants=False)


@add(CHECKS, "float8")
def _float8(op: Op, device: str) -> str:
    """A dtype without arithmetic raises a one-line error."""
    if any(t.dtype in _FLOAT8 for sample in op.sample(device) for t in sample.tensors()):
        raise Skipped("a sample has a float8 tensor, so the op takes that")
    [sample] = distinct_samples(op, device, 1, lambda sample: sample.numel > 0)
    for call in trials(sample.replace(index, torch.zeros_like(t, dtype=torch.float8_e4m3fn)) for index, t in enumerate(sample.tensors())):
        _refusal(op, call)
    return "rejected with a one-line error"

"""Calls that an op must reject, with a one-line error that names it."""

from __future__ import annotations

from typing import Any

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample
from opjit.testing.checks import Check, add, expect_one_line, tally
from opjit.testing.compare import Tolerance, assert_same
from opjit.testing.samples import Skipped, distinct_samples, effects
from opjit.testing.trials import trials

CHECKS: list[Check] = []
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EIGHTH = Tolerance(0.125, 0.02)  # float8 has 3 bits after the first


def _refusal(op: Op, sample: Sample) -> str:
    """The error message of a call that the op must reject."""
    try:
        effects(op.overload, op, sample)
    except RuntimeError as error:
        return expect_one_line(op, error, sample)
    raise AssertionError(f"on ({sample}) the op must raise a RuntimeError, but it returns a result")


def _with_dimensions(op: Op, device: str) -> Sample:
    return distinct_samples(op, device, 1, lambda sample: all(t.dim() for t in sample.tensors()), "of tensors with dimensions")[0]


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
    """A dtype without arithmetic gives the reference's results, or a one-line error."""
    if any(t.dtype in _FLOAT8 for sample in op.samples_on(device) for t in sample.tensors()):
        raise Skipped("a sample has a float8 tensor, so the op takes that")
    [sample] = distinct_samples(op, device, 1, lambda sample: sample.numel > 0, "with elements")
    taken = 0
    for call in trials(sample.replace(index, t.to(torch.float8_e4m3fn)) for index, t in enumerate(sample.tensors())):
        try:
            got = effects(op.overload, op, call)
        except RuntimeError as error:
            expect_one_line(op, error, call)
            continue
        assert_same(list(map(_widened, got)), _expected(op, call), call, within=_EIGHTH)
        taken += 1
    return tally(taken, "sample") if taken else "rejected with a one-line error"


def _expected(op: Op, call: Sample) -> list[Any]:
    """The reference's results; where it takes no float8, those for float32 of the same values."""
    try:
        return list(map(_widened, effects(op.reference_function, op, call)))
    except Exception:  # any error of the reference means that torch cannot compute it
        return list(map(_widened, effects(op.reference_function, op, call.map(_widened))))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _FLOAT8 else value

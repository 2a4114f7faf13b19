"""Compare results with the reference, and explain differences."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from opjit.judge.task import Expected
from opjit.judge.verdict import Failure
from opjit.testing.compare import Tolerance, assert_same

# The largest error of a few operations in half precision, relative to the largest element.
_LOW = 2.0**-7


def max_error(got: Iterable[Any], expected: Iterable[Any]) -> float:
    """Return the largest absolute difference of any two elements, or 0 without numbers."""
    differences = [
        float(max_difference(one, other))
        for one, other in zip(got, expected, strict=False)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if not _equal(one, other)
    ]
    return max(differences, default=0.0)


def max_difference(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of two tensors, as a tensor of float64, or 0 if their shapes differ."""
    if got.shape != expected.shape or not got.numel():
        return torch.zeros((), dtype=torch.float64, device=got.device)
    kind = torch.complex128 if got.is_complex() or expected.is_complex() else torch.float64
    return (got.to(kind) - expected.to(kind)).abs().nan_to_num(0, 0, 0).max()


def compare(
    got: list[Any], call: Expected, others: Iterable[list[Any]] = ()
) -> tuple[Failure, str] | None:
    """Compare a call's results with the reference's, and wrong ones with the results of other calls.

    Returns None, or a verdict and its reason.
    """
    if _agree(got, call):
        return None
    try:
        assert_same(got, call.results, call.sample)
        return None
    except AssertionError as error:
        difference = str(error)
    except (TypeError, ValueError):  # torch cannot compare them, for example a dict
        kinds = ", ".join(type(each).__name__ for each in call.results)
        return "wrong", f"expected {kinds}, got {', '.join(map(str, got))[:200]}"

    for one, other in zip(got, call.results, strict=False):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if one.shape != other.shape or not one.numel():
            continue
        explanation = next(_explain_difference(one, other, call, others), "")
        if explanation:
            is_kept = explanation.startswith("returns the result of")
            return ("cheat" if is_kept else "wrong"), f"{explanation}; {difference}"
    return "wrong", difference


def _agree(got: list[Any], call: Expected) -> bool:
    """Return whether all results are finite floats within tolerance: ten times faster than `assert_same`."""
    if len(got) != len(call.within):
        return False
    for one, other, within in zip(got, call.results, call.within, strict=True):
        if not any(within) or not isinstance(one, torch.Tensor):
            return False
        if not _equal(one, other) and differ(one, other, within):
            return False
    return True


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal elements, without NaN: faster than computing differences."""
    if one.dtype == torch.complex32:  # torch.equal does not support it
        return False
    return one.dtype == other.dtype and torch.equal(one, other)


def differ(one: torch.Tensor, other: torch.Tensor, within: Tolerance) -> torch.Tensor:
    """Return whether any elements differ, as a tensor: nothing waits for the device. NaN differs from everything."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return torch.ones((), dtype=torch.bool, device=one.device)
    if any(within):
        return ((one - other).abs() <= within.atol + within.rtol * other.abs()).all().logical_not()
    mine = one.contiguous().flatten().view(torch.uint8)
    theirs = other.contiguous().flatten().view(torch.uint8)
    return mine.ne(theirs).any()


def _explain_difference(
    got: torch.Tensor, expected: torch.Tensor, call: Expected, others: Iterable[list[Any]]
) -> Iterator[str]:
    """Yield descriptions of a wrong result that fit it."""
    if _has_unwritten_memory(got, expected):
        yield "leaves elements of its output unwritten"
    if not got.any():
        yield "returns all zeros"
    if any(_same(got, each) for each in call.sample.tensors()):
        yield "returns an input"
    if got.numel() > 1:
        if bool((got == got.flatten()[0]).all()):
            yield "returns a constant"
        results = (each for other in others for each in other if isinstance(each, torch.Tensor))
        if any(_same(got, each) for each in results):
            yield "returns the result of another call"
    if got.is_floating_point():
        largest = float(expected.double().abs().max())
        difference = float((got.double() - expected.double()).abs().max())
        if difference <= _LOW * largest:
            yield "computes in lower precision"


def _has_unwritten_memory(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a quarter of the bytes have the values with which new memory is filled."""
    fillings = [0xFE]
    if not got.is_floating_point() or not torch.equal(got.isnan(), expected.isnan()):
        fillings.append(0xFF)  # NaN
    raw = got.contiguous().flatten().view(torch.uint8)
    return any(int((raw == filling).sum()) * 4 >= raw.numel() for filling in fillings)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    largest = 0.0
    if other.is_floating_point() and other.numel():
        largest = float(other.nan_to_num(0, 0, 0).abs().max())
    # An element near 0 has the sum's rounding.
    return torch.allclose(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6 * largest)

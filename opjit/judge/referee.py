"""Holds results against the reference's, and says what wrong ones look like."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from opjit.judge.task import Expected
from opjit.judge.verdict import Word
from opjit.testing.compare import Tolerance, assert_same

_LOW = 2.0**-7  # of the largest element, that half precision is off at most after a few operations


def max_error(got: Iterable[Any], expected: Iterable[Any]) -> float:
    """The largest absolute difference of any two elements; 0 for results without numbers."""
    return max(
        (
            float(max_difference(one, other))
            for one, other in zip(got, expected, strict=False)
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        ),
        default=0.0,
    )


def max_difference(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The same of two tensors, as a tensor of float64; 0 if their shapes differ."""
    if got.shape != expected.shape or not got.numel():
        return torch.zeros((), dtype=torch.float64, device=got.device)
    kind = torch.complex128 if got.is_complex() or expected.is_complex() else torch.float64
    return (got.to(kind) - expected.to(kind)).abs().nan_to_num(0, 0, 0).max()


def compare(
    got: list[Any], call: Expected, others: Iterable[list[Any]] = ()
) -> tuple[Word, str] | None:
    """Compare a call's results with the reference's, and where they differ with those of other calls: returns a verdict and its reason."""
    if _agree(got, call):
        return None
    try:
        assert_same(got, call.results, call.sample)
        return None
    except AssertionError as error:
        pairs = [
            (one, other)
            for one, other in zip(got, call.results, strict=False)
            if isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and one.numel()
        ]
        looks = next(
            (text for one, other in pairs for text in _looks(one, other, call, others)), ""
        )
        return "cheat" if looks.startswith(
            "returns the result of"
        ) else "wrong", f"{looks}{'; ' * bool(looks)}{error}"


def _agree(got: list[Any], call: Expected) -> bool:
    """Whether all results are finite floats near enough, in a tenth of the time in which a difference is put into words."""
    return len(got) == len(call.within) and all(
        any(within) and isinstance(one, torch.Tensor) and not differ(one, other, within)
        for one, other, within in zip(got, call.results, call.within, strict=True)
    )


def differ(one: torch.Tensor, other: torch.Tensor, within: Tolerance) -> torch.Tensor:
    """Whether any elements differ, as a tensor: nothing waits for the device. NaN differs from everything."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return torch.ones((), dtype=torch.bool, device=one.device)
    if any(within):
        return ((one - other).abs() <= within.atol + within.rtol * other.abs()).all().logical_not()
    return (
        one.contiguous()
        .flatten()
        .view(torch.uint8)
        .ne(other.contiguous().flatten().view(torch.uint8))
        .any()
    )


def _looks(
    got: torch.Tensor, expected: torch.Tensor, call: Expected, others: Iterable[list[Any]]
) -> Iterator[str]:
    """Say what a wrong result is, where that is known."""
    raw, wrong = (
        got.contiguous().flatten().view(torch.uint8),
        got.is_floating_point() and not torch.equal(got.isnan(), expected.isnan()),
    )
    if any(
        int((raw == byte).sum()) * 4 >= raw.numel()
        for byte in ((0xFE, 0xFF) if wrong or not got.is_floating_point() else (0xFE,))
    ):
        yield "leaves elements of its output unwritten"
    if not got.any():
        yield "returns all zeros"
    if any(_same(got, each) for each in call.sample.tensors()):
        yield "returns an input"
    if got.numel() > 1 and bool((got == got.flatten()[0]).all()):
        yield "returns a constant"
    if got.numel() > 1 and any(
        _same(got, each) for other in others for each in other if isinstance(each, torch.Tensor)
    ):
        yield "returns the result of another call"
    if got.is_floating_point() and float(
        (got.double() - expected.double()).abs().max()
    ) <= _LOW * float(expected.double().abs().max()):
        yield "computes in lower precision"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    largest = float(other.abs().max()) if other.is_floating_point() and other.numel() else 0.0
    return torch.allclose(
        one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6 * largest
    )  # an element near 0 has the sum's rounding

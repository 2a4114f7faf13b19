"""Compare the results of an op with the reference: tolerances, and the first difference."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, float32
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from opjit.declare.sample import Sample

# The tolerances of torch.testing, except for float64: its 1e-7 accepts a result that was computed
# in float32.
_DEFAULTS = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    float32: (1.3e-6, 1e-5),
    torch.float64: (1e-9, 1e-9),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-9, 1e-9),
}

_NEW = 0xFE  # the byte of memory that nothing wrote, see isolation.py


def import_all() -> None:
    """Have torch import what its comparisons need, 518 modules at the first: no call's time is to count them."""
    assert_close(torch.ones(1), torch.ones(1))


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


class Tolerance(NamedTuple):
    """The largest difference that counts as rounding: atol + rtol * expected."""

    rtol: float
    atol: float


def tolerance(expected: Tensor, sample: Sample | None) -> Tolerance:
    """Return the sample's tolerance or, without one, the dtype's, which is wider for long sums.

    Rounding errors of n additions grow with the square root of n in relation to the sum, and with n
    in relation to an element, if the sum is near 0.
    """
    if expected.dtype not in _DEFAULTS:
        return Tolerance(0, 0)
    rtol, atol = _DEFAULTS[expected.dtype]
    if sample is None:
        return Tolerance(rtol, atol)
    inputs = [t for t in sample.tensors() if t.dtype in _DEFAULTS and t.numel()]
    longest = max((size for t in inputs for size in t.shape), default=1)
    summands = max((t.numel() for t in inputs), default=1) / max(1, expected.numel())
    size = max(
        (t.detach().abs().nan_to_num(0, 0, 0).double().mean().item() for t in inputs), default=0.0
    )
    eps = torch.finfo(expected.dtype).eps
    rtol = max(rtol, 4 * eps * max(longest, summands) ** 0.5)
    atol = max(atol, eps * summands * size) if summands > 1 else atol
    return Tolerance(
        rtol if sample.rtol is None else sample.rtol, atol if sample.atol is None else sample.atol
    )


def as_list(result: Any) -> list[Any]:
    """Return the results of a call, with the items of lists."""
    if result is None:
        return []
    return tree_leaves(result, lambda value: not isinstance(value, (tuple, list)))


def assert_same(
    got: Any,
    expected: Any,
    sample: Sample | None = None,
    what: str = "",
    within: Tolerance | None = None,
) -> None:
    """Raise AssertionError with the first difference in one line, of results or of `what`. `within`: in place of the sample's tolerance."""
    mine = as_list(got)
    theirs = as_list(expected)
    where = f"{f' of {what}' if what else ''}{f' on ({sample})' if sample is not None else ''}"
    assert len(mine) == len(theirs), f"got {len(mine)} results, expected {len(theirs)}{where}"
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        place = f" of result {number}{where}" if len(mine) > 1 else where
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            _assert_tensors_same(one, other, place, within or tolerance(other, sample))
        else:
            try:
                assert_close(one, other, equal_nan=True)
            except AssertionError:
                raise AssertionError(f"got {one!r}, expected {other!r}{place}") from None


def _assert_tensors_same(got: Tensor, expected: Tensor, where: str, within: Tolerance) -> None:
    kinds = [f"{dtype_name(t.dtype)} {tuple(t.shape)} on {t.device.type}" for t in (got, expected)]
    assert kinds[0] == kinds[1], f"got {kinds[0]}, expected {kinds[1]}{where}"
    try:
        assert_close(got, expected, rtol=within.rtol, atol=within.atol, equal_nan=True)
    except AssertionError as error:
        differ = ~torch.isclose(got, expected, rtol=within.rtol, atol=within.atol, equal_nan=True)
        if not differ.any():  # such as layouts
            raise AssertionError(f"{' '.join(str(error).split())}{where}") from None
        index = tuple(differ.nonzero()[0].tolist())
        at = f" at [{', '.join(map(str, index))}]" if index else ""
        how = f" by more than rtol {within.rtol:.2g}, atol {within.atol:.2g}" if any(within) else ""
        raise AssertionError(
            f"got {_shown(got[index])}, expected {_shown(expected[index])}{at}{where}; "
            f"{int(differ.sum())} of {got.numel()} elements differ{how}"
        ) from None


def _shown(element: Tensor) -> str:
    """An element with as many digits as its dtype has."""
    value = element.item()
    text = f"{value:.9g}" if element.dtype == float32 else f"{value}"
    is_new = element.element_size() > 1 and (element.reshape(1).view(torch.uint8) == _NEW).all()
    return f"{text} (memory that the kernel did not write)" if is_new else text

"""Checks of results: the reference's, for any layout, dtype, size and thread."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf, nan
from random import Random
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from opjit import backends
from opjit.declare.sample import Sample
from opjit.operators.op import Op
from opjit.progress import tally
from opjit.testing.checks import Check, add
from opjit.testing.compare import Tolerance, as_list, assert_same, dtype_name
from opjit.testing.samples import (
    FLOAT8,
    LARGE,
    ReferenceFailed,
    Skipped,
    called,
    distinct_samples,
    effects,
    emptied,
    expected_of,
    floating,
    laid,
    large_samples,
    layouts,
    resized,
    results_of,
    rolled,
    trials,
    unequal,
    watch,
    with_elements,
    with_indices,
    with_invalid_arguments,
    with_numbers,
)

# The dtypes that the check "dtypes" tries.
_DTYPE_NAMES = """
    bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn
"""
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPE_NAMES.split())
_EIGHTH = Tolerance(0.125, 0.02)  # float8 has 3 bits after the first
_DRAWN = 40  # shapes
_REPEATS = 4  # of a wrong call, to see whether it is always as wrong
_MOST = 1 << 20  # elements of a call that a check makes larger
_SIDE = 67  # of a tensor that starts at an odd element
_LARGE_CALLS = 2  # of different kinds, that threads make
_BRIEF_S = 0.01  # CPU seconds of a thread with small calls
_OVERLAP_S = 0.1  # and with large ones: longer than a busy system lets one thread run alone
CHECKS = list[Check]()
OPTIONAL: list[Check] = []  # run by name only


def _compare_sample(op: Op, sample: Sample) -> bool | None:
    """Compare op and reference.

    Returns True if the op accepts the call, False if it rejects it in one line, and None if the
    reference rejects it.
    """
    float8 = any(t.dtype in FLOAT8 for t in sample.tensors())
    expected = _expected(op, (sample, sample.map(_widened)))
    if expected is None:
        return None
    got = _results_unless_rejected(op, sample)
    if got is None:
        return False
    if float8:
        got = list(map(_widened, got))
        expected = list(map(_widened, expected))
        assert_same(got, expected, sample, within=_EIGHTH)
    else:
        _assert_right(op, sample, got, expected)
    return True


def _results_unless_rejected(op: Op, sample: Sample) -> list[Any] | None:
    """Call the op. Returns None if it rejects the call. Raises AssertionError if its error is not one line that names the op."""
    try:
        return results_of(op, sample)
    except RuntimeError as error:
        message = str(error)
        if op.schema.name not in message or "\n" in message.strip():
            raise AssertionError(
                f"on ({sample}) the op must raise a one-line error that names it, but its error "
                f"is {message!r}"
            ) from None
        return None


def _assert_right(op: Op, sample: Sample, got: list[Any], expected: list[Any]) -> None:
    """Compare results, and report if wrong results differ between equal calls."""
    try:
        assert_same(got, expected, sample)
    except AssertionError as error:
        if all(_is_close(results_of(op, sample), got) for _ in range(_REPEATS)):
            raise
        on_cpu = all(tensor.is_cpu for tensor in sample.tensors())
        tool = "thread" if on_cpu else "racecheck"
        raise AssertionError(
            f"{error}; equal calls give different results, which a race or memory outside the "
            f"tensors does: run `opjit test --sanitize {tool}`"
        ) from None


def _is_close(results: list[Any], others: list[Any], rtol: float = 0) -> bool:
    """Return whether two results of any dtypes are equal, NaN included, except for rounding."""
    with suppress(AssertionError):
        torch.testing.assert_close(
            results, others, rtol=rtol, atol=0, equal_nan=True, check_dtype=False
        )
        return True
    return False


def _expected(op: Op, calls: Iterable[Sample]) -> list[Any] | None:
    """Return the reference's results of the first call that it accepts: an error of the
    reference means that a call is invalid.
    """
    for call in calls:
        with suppress(Exception):
            return expected_of(op, call)
    return None


def _widened(value: Any) -> Any:
    """Float32 in place of float8, of which torch computes little."""
    return value.float() if isinstance(value, Tensor) and value.dtype in FLOAT8 else value


def _compare_all(op: Op, calls: Iterable[Sample], what: str) -> str:
    """Compare op and reference on calls that the op may accept or reject. Returns the note."""
    answers = Counter(_compare_sample(op, call) for call in trials(calls))
    if not answers[True] and not answers[False]:
        raise Skipped(f"the reference accepts no {what} derived from the samples")

    note = f"{answers[True]} {what}"
    if answers[False]:
        note += f", {answers[False]} rejected with a one-line error"
    if answers[None]:
        note += f", {answers[None]} left out because the reference rejects them"
    return note


@add(CHECKS, "results")
def _sample_results(op: Op, device: str) -> str:
    """Results equal the reference's on every sample, and so do the results of each variant."""
    labels = op.declaration.labels(backends.for_device(device))
    for sample in trials(op.samples_on(device)):
        expected = expected_of(op, sample)
        _assert_right(op, sample, results_of(op, sample), expected)
        for number, label in enumerate(labels):
            namespace = getattr(torch.ops, op.schema.namespace)
            variant = getattr(namespace, f"{op.schema.name}_variant")
            found = effects(partial(variant, number), op, sample)
            assert_same(found, expected, sample, f"the variant {label}")
    return tally(len(labels), "variant") if labels else "every sample"


@add(CHECKS, "numbers")
def _numbers(op: Op, device: str) -> str:
    """Each number or flag with another value gives the reference's results, or a one-line error, and so does its first value after that."""

    calls = [
        call
        for sample in distinct_samples(op, device, 4)
        for changed in with_numbers(sample, _another)
        for call in (sample, changed, sample)
    ]
    if not calls:
        raise Skipped("the samples do not have a number or flag among their arguments")
    return _compare_all(op, calls, "calls")


def _another(value: object) -> list[object]:
    """Return another value for a number or flag, in a list; for anything else an empty list."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 0.618 or 0.5]  # which no conversion to an integer keeps
    return []


@add(CHECKS, "rejects")
def _rejections(op: Op, device: str) -> str:
    """Calls that the reference rejects raise a one-line error: indices and numbers out of range, and tensors without dimensions.

    On CUDA, where a kernel cannot raise an error for an index, such a call must stay in bounds.
    """
    samples = distinct_samples(op, device, 8)
    indices = [call for sample in samples for call in with_indices(sample)]
    others = [call for sample in samples for call in with_invalid_arguments(sample)]
    calls = [call for call in (*indices, *others) if _rejection(op, call)]
    if not calls:
        raise Skipped("the reference accepts every index, number and tensor that was tried")
    must_raise = {*map(str, others), *(map(str, indices) if device == "cpu" else ())}
    raised = 0
    for sample in trials(calls):
        if _results_unless_rejected(op, sample) is None:
            raised += 1
        elif str(sample) in must_raise:
            raise AssertionError(
                f"on ({sample}) the op must raise an error, because its reference raises {_rejection(op, sample)}; check the "
                "arguments with OPJIT_CHECK"
            )
    return f"{raised} rejected with a one-line error"


def _rejection(op: Op, sample: Sample) -> str | None:
    """Return the reference's error on the CPU: on CUDA, an assertion in a kernel of torch would end all calls of the process."""
    try:
        expected_of(op, sample.map(Tensor.cpu))
    except ReferenceFailed as failed:
        return repr(failed.__cause__)
    return None


@add(CHECKS, "nan and inf")
def _special(op: Op, device: str) -> str:
    """NaN and infinities give the reference's results."""

    what = "with floating-point elements"
    special = (nan, inf, -inf)
    calls = (
        call
        for sample in distinct_samples(op, device, 8, _takes_special_values, what)
        for call in with_elements(sample, lambda t: special if t.dtype.is_floating_point else ())
    )
    for call in trials(calls):
        expected = expected_of(op, call)
        assert_same(results_of(op, call), expected, call)
    return "in every tensor"


def _takes_special_values(sample: Sample) -> bool:
    """Return whether a call has floating-point elements and converts none to an integer, which C does not define for an infinity."""
    dtypes = [value for value in tree_leaves(sample.values) if isinstance(value, torch.dtype)]
    to_integers = any(not dtype.is_floating_point and not dtype.is_complex for dtype in dtypes)
    return not to_integers and floating(sample) and _is_full(sample)


def _is_full(sample: Sample) -> bool:
    return all(t.numel() for t in sample.tensors())


@add(CHECKS, "strides")
def _strides(op: Op, device: str) -> str:
    """Tensors that are not contiguous, or that start one element after an aligned address, give the same results, or a one-line error."""

    samples = distinct_samples(
        op,
        device,
        8,
        lambda sample: any(t.dim() and t.numel() for t in sample.tensors()),
        "with dimensions",
    )
    calls = [laid(sample, layout) for sample in samples for layout in layouts(op)]
    for sample in samples:
        longer = resized(sample, [_SIDE])  # long enough for some vectors and a rest
        if longer is not None and longer.numel <= _MOST:
            calls.append(laid(longer, "offset"))
    return _compare_all(op, calls, "layouts")


@add(CHECKS, "dtypes")
def _dtypes(op: Op, device: str) -> str:
    """Each dtype gives the reference's results, or a one-line error; float8 may be compared with float32."""

    small = distinct_samples(op, device, 2, lambda s: 0 < s.numel <= 1000, "of 1 to 1000 elements")
    calls = [_as_dtype(sample, dtype) for dtype in DTYPES for sample in small]
    calls += [call for sample in small for call in _beyond_32_bits(op, sample)]
    answers = dict[str, bool]()
    for call in trials(calls):
        answer = _compare_sample(op, call)
        if answer is not None:
            answers[call.note.removeprefix("as ")] = answer

    if not answers:
        raise Skipped("the reference accepts none of the dtypes")
    accepted = ", ".join(name for name, answer in answers.items() if answer)
    rejected = ", ".join(name for name, answer in answers.items() if not answer)
    return f"{accepted}; rejected: {rejected}" if rejected else accepted


def _as_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    """Convert a call's values. As float64, they have more digits than float32."""

    def convert(tensor: Tensor) -> Tensor:
        converted = tensor.to(dtype)
        return converted * (1 - 2**-26) if dtype == torch.float64 else converted

    return _with_values(sample, convert, f"as {dtype_name(dtype)}")


def _beyond_32_bits(op: Op, sample: Sample) -> Iterator[Sample]:
    """Yield a call with int64 values of which 32 bits lose digits, if the reference is exact for it.

    The reference must give the same integers for float64. Otherwise a result overflows, or the
    elements may be indices or counts, which torch rejects as float64.
    """

    def draw(tensor: Tensor) -> Tensor:
        steps = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        signs = torch.where(steps % 3 == 1, -1, 1)
        return signs * (3_000_000_001 + 2 * steps)  # the product of two has 63 bits

    call = _with_values(sample, draw, "as int64 beyond 32 bits")
    rounded = _expected(op, [_with_values(sample, lambda t: draw(t).double(), "")])
    exact = rounded and _expected(op, [call])
    if not rounded or not exact:
        return
    floats = any(torch.as_tensor(result).is_floating_point() for result in exact)
    if not floats and _is_close(exact, rounded, rtol=1e-9):
        yield call


def _with_values(sample: Sample, change: Callable[[Tensor], Tensor], note: str) -> Sample:
    """Change the floating-point tensors of a call, or all of them if none is floating-point."""
    only_floating = floating(sample)
    return sample.map(
        lambda t: change(t) if t.dtype.is_floating_point or not only_floating else t, note
    )


@add(CHECKS, "shapes")
def _shapes(op: Op, device: str) -> str:
    """Without dimensions, with sizes of 0, unequal or drawn at random, results are the reference's, or there is a one-line error."""

    samples = distinct_samples(op, device, 8, _is_full, "without empty tensors")
    calls = [call for sample in samples for call in emptied(sample)]
    larger = [call for sample in samples for call in unequal(sample)]
    larger += _drawn_shapes(op, device)
    larger.sort(key=lambda call: call.numel)  # the first that fails is the smallest
    return _compare_all(op, [*calls, *larger], "shapes")


def _drawn_shapes(op: Op, device: str) -> list[Sample]:
    """Draw calls with other sizes and layouts, the same in each run."""

    try:
        samples = distinct_samples(op, device, 8, lambda s: resized(s, [1]) is not None)
    except Skipped:
        return []
    draw = Random(0)
    found = []
    for _ in range(_DRAWN):
        sample = draw.choice(samples)
        sizes = [draw.choice([*range(18), 31, 64, 65]) for _ in range(4)]
        call = resized(sample, sizes)
        assert call is not None
        found.append(laid(call, draw.choice(["contiguous", *layouts(op)])))
    return found


@add(OPTIONAL, "batch")
def _batch(op: Op, device: str) -> str:
    """Rows have exactly the same results in a smaller batch, if the reference computes each row by itself."""
    compared = 0
    for sample in trials(distinct_samples(op, device, 8, _is_full)):
        got, expected = results_of(op, sample), expected_of(op, sample)
        first = sample.tensors()[0]
        size = max(first.shape[:1], default=0)
        for rows in (slice(0, 1), slice(size // 2, size)) if size > 1 else ():
            pick = partial(_rows, rows, size)
            for call in (sample.replace(0, pick(first)), sample.map(pick)):
                alone = _expected(op, [call]) or []
                if _is_close(alone, list(map(pick, expected)), rtol=0.01):
                    what = f"rows {rows.start} to {rows.stop - 1} without the other rows"
                    exactly = list(map(pick, got))
                    assert_same(results_of(op, call), exactly, sample, what, Tolerance(0, 0))
                    compared += 1
    if not compared:
        raise Skipped("the reference computes no row of the samples by itself")
    return f"{compared} with fewer rows"


def _rows(rows: slice, size: int, value: Any) -> Any:
    """Copy some rows of a tensor that has one for each row of a batch."""
    has_rows = isinstance(value, Tensor) and value.shape[:1] == (size,)
    return value[rows].clone() if has_rows else value


@add(CHECKS, "threads")
def _four_threads(op: Op, device: str) -> str:
    """Four threads that call the op at the same time, each with other data, get the results that one thread gets."""
    small = distinct_samples(op, device, 4)
    large = large_samples(op, device)
    compared = 0  # large calls
    with ThreadPoolExecutor(4) as pool:
        for sample in trials([*small, *large]):
            is_large = sample.numel >= LARGE
            if is_large and compared == _LARGE_CALLS:
                break
            if _compare_sample(op, sample):
                assert_same_in_threads(op, sample, pool)
                compared += is_large

    if not compared and watch.get().only is None:
        raise Skipped(
            "no sample can be made large: the op or its reference rejects each enlarged one, "
            f"such as ({large[0]}); add a sample of {LARGE} elements"
        )
    return "4 at the same time"


def assert_same_in_threads(op: Op, sample: Sample, pool: ThreadPoolExecutor) -> None:
    """Call the op in four threads at the same time, each with other data, and compare with one thread's results."""
    calls = [sample.map(partial(rolled, by=by)) for by in range(4)]
    expected = [results_of(op, call) for call in calls]
    differing = partial(_first_different, op)
    for found, wanted in zip(pool.map(differing, calls, expected), expected, strict=True):
        if found is not None:
            assert_same(found, wanted, sample, "a call, with four threads at once,")


def _first_different(op: Op, call: Sample, wanted: list[Any]) -> list[Any] | None:
    """Repeat a call, and return its first results that are not exactly the wanted ones.

    The loop does little except the calls, so that the calls of the threads overlap.
    """
    seconds = _OVERLAP_S if call.numel >= LARGE else _BRIEF_S
    end = thread_time() + seconds
    while True:
        # The call leaves the sample as it is.
        found = results_of(op, call) if op.schema.mutates else as_list(called(op.overload, call))
        if not all(map(_equal, found, wanted)):
            return found
        if thread_time() > end:
            return None


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one == other

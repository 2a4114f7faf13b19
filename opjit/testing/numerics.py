"""Checks of results: the reference's, for any layout, dtype, size and thread."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf, nan
from random import Random
from time import thread_time
from typing import Any

import torch

from opjit import backends
from opjit.declare.op import Op
from opjit.declare.sample import Sample
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import Tolerance, as_list, assert_same
from opjit.testing.samples import (
    Skipped,
    distinct_samples,
    effects,
    emptied,
    floating,
    laid,
    layouts,
    replica,
    resized,
    rolled,
    trials,
)

# The dtypes that the check "dtypes" tries.
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EIGHTH = Tolerance(0.125, 0.02)  # float8 has 3 bits after the first
_DRAWN = 40  # shapes
_SIDE = 67  # of a tensor that starts at an odd element
_LARGE = 1 << 16  # elements: calls that overlap
_BRIEF_S, _OVERLAP_S = (
    0.01,
    0.1,
)  # CPU seconds of a thread with small calls, and with large: longer than a busy system lets one run alone
CHECKS: list[Check] = []


def _compare(op: Op, sample: Sample) -> bool | None:
    """Compare op and reference: True if the op takes the call, False if it rejects it in one line, None if the reference rejects it."""
    float8 = any(t.dtype in _FLOAT8 for t in sample.tensors())
    expected = _expected(op, [sample, sample.map(_widened)] if float8 else [sample])
    if expected is None:
        return None
    try:
        got = effects(op.overload, op, sample)
    except RuntimeError as error:
        message = str(error)
        if op.schema.name not in message or "\n" in message.strip():
            raise AssertionError(
                f"on ({sample}) the op must raise a one-line error that names it, but it says {message!r}"
            ) from None
        return False
    if float8:
        assert_same(list(map(_widened, got)), list(map(_widened, expected)), sample, within=_EIGHTH)
    else:
        assert_same(got, expected, sample)
    return True


def _expected(op: Op, calls: Iterable[Sample]) -> list[Any] | None:
    """The reference's results of the first call that it takes: any of its errors means that a call makes no sense."""
    for call in calls:
        with suppress(Exception):
            return effects(op.reference_function, op, call)
    return None


def _widened(value: Any) -> Any:
    """Float32 in place of float8, of which torch computes little."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _FLOAT8 else value


def _compare_all(op: Op, calls: Iterable[Sample], what: str) -> str:
    """Compare op and reference on calls that the op may take or reject. Returns the note."""
    known = [
        answer for answer in (_compare(op, call) for call in trials(calls)) if answer is not None
    ]
    if not known:
        raise Skipped(f"the reference takes no {what} derived from the samples")
    taken = sum(known)
    return f"{taken} {what}" + (
        f", {len(known) - taken} rejected with a one-line error" if taken < len(known) else ""
    )


@add(CHECKS, "results")
def _results(op: Op, device: str) -> str:
    """Results equal the reference's on every sample, and so do those of each variant."""
    calls, labels = list(op.samples_on(device)), op.labels(backends.for_device(device))
    variant: Any = (
        getattr(getattr(torch.ops, op.schema.namespace), f"{op.schema.name}_variant")
        if labels
        else None
    )
    for sample in trials(calls):
        expected = effects(op.reference_function, op, sample)
        assert_same(effects(op.overload, op, sample), expected, sample)
        for number, label in enumerate(labels):
            assert_same(
                effects(partial(variant, number), op, sample),
                expected,
                sample,
                f"the variant {label}",
            )
    return tally(len(calls), "sample") + (f", {tally(len(labels), 'variant')}" if labels else "")


@add(CHECKS, "nan and inf")
def _special(op: Op, device: str) -> str:
    """NaN and infinities give the reference's results."""

    def calls() -> Iterator[Sample]:
        for sample in distinct_samples(
            op,
            device,
            8,
            lambda sample: floating(sample) and all(t.numel() for t in sample.tensors()),
            "with floating-point elements",
        ):
            for index, tensor in enumerate(sample.tensors()):
                for special in (nan, inf, -inf) if tensor.dtype.is_floating_point else ():
                    changed = replica(tensor)
                    changed[(0,) * tensor.dim()] = special
                    yield sample.replace(index, changed, f"with {special} in tensor {index}")

    for call in trials(calls()):
        expected = effects(op.reference_function, op, call)
        assert_same(effects(op.overload, op, call), expected, call)
    return "in every tensor"


@add(CHECKS, "strides")
def _strides(op: Op, device: str) -> str:
    """Tensors that are not contiguous, or that start one element after an aligned address, give the same results, or a one-line error."""
    calls = distinct_samples(
        op,
        device,
        8,
        lambda sample: any(t.dim() and t.numel() for t in sample.tensors()),
        "with dimensions",
    )
    longer = filter(
        None, (resized(sample, [_SIDE]) for sample in calls)
    )  # some vectors, and a rest
    return _compare_all(
        op,
        (
            *(laid(sample, layout) for sample in calls for layout in layouts(op)),
            *(laid(sample, "offset") for sample in longer),
        ),
        "layouts",
    )


@add(CHECKS, "dtypes")
def _dtypes(op: Op, device: str) -> str:
    """Each dtype gives the reference's results, or a one-line error; float8 those of float32 where the reference takes none."""
    taken, rejected = list[str](), list[str]()
    small = distinct_samples(
        op, device, 2, lambda sample: 0 < sample.numel <= 1000, "of 1 to 1000 elements"
    )

    def change(sample: Sample, dtype: torch.dtype) -> Sample:
        some, name = floating(sample), str(dtype).removeprefix("torch.")
        return sample.map(
            lambda t: t.to(dtype) if t.dtype.is_floating_point or not some else t, f"as {name}"
        )

    for call in trials(change(sample, dtype) for dtype in DTYPES for sample in small):
        answer = _compare(op, call)
        if answer is not None:
            (taken if answer else rejected).append(call.note.removeprefix("as "))
    if not taken and not rejected:
        raise Skipped("the reference takes none of the dtypes")
    return f"{', '.join(dict.fromkeys(taken))}" + (
        f"; rejected: {', '.join(dict.fromkeys(rejected))}" if rejected else ""
    )


@add(CHECKS, "shapes")
def _shapes(op: Op, device: str) -> str:
    """No dimensions, sizes of 0, and sizes drawn at random, the same in each run, give the reference's results, or a one-line error."""
    calls = distinct_samples(
        op,
        device,
        8,
        lambda sample: all(t.numel() for t in sample.tensors()),
        "without empty tensors",
    )
    empty = [call for sample in calls for call in emptied(sample)]
    resizable = [sample for sample in calls if resized(sample, [1]) is not None]
    draw = Random(0)
    drawn = [
        resized(draw.choice(resizable), [draw.choice([*range(18), 31, 64, 65]) for _ in range(4)])
        for _ in range(_DRAWN)
        if resizable
    ]
    full = [laid(call, draw.choice(["contiguous", *layouts(op)])) for call in filter(None, drawn)]
    return _compare_all(
        op, [*empty, *sorted(full, key=lambda call: call.numel)], "shapes"
    )  # the first that fails is the smallest


@add(CHECKS, "threads")
def _threads(op: Op, device: str) -> str:
    """Four threads that call the op at once, each with other data, get the results that one thread gets."""
    with ThreadPoolExecutor(4) as pool:
        for sample in trials(calls_in_threads(op, device)):
            if _compare(op, sample):
                assert_same_in_threads(op, sample, pool)
    return "4 at once"


def calls_in_threads(op: Op, device: str) -> list[Sample]:
    """Small calls, and some that are large enough to overlap, and to be split by opjit_parallel_for."""
    small = distinct_samples(op, device, 4)
    sides = [int(_LARGE ** (1 / max(1, *(t.dim() for t in sample.tensors())))) for sample in small]
    return [*small, *list(filter(None, map(resized, small, ([side] for side in sides))))[:2]]


def assert_same_in_threads(op: Op, sample: Sample, pool: ThreadPoolExecutor) -> None:
    """Call the op in four threads at once, each with other data, and compare with one thread's results."""
    calls = [sample.map(lambda t, by=by: rolled(t, by)) for by in range(4)]  # type: ignore[misc]
    expected = [effects(op.overload, op, call) for call in calls]

    def first_other(call: Sample, wanted: list[Any]) -> list[Any] | None:
        """The first result that is not the wanted one, if only by rounding. Between the calls is little else, so that they overlap."""
        end = thread_time() + (_OVERLAP_S if sample.numel >= _LARGE else _BRIEF_S)
        while True:
            found = (
                effects(op.overload, op, call)
                if op.schema.mutates
                else as_list(op.overload(*call.args, **call.kwargs))
            )
            if not all(map(_equal, found, wanted)):
                return found
            if thread_time() > end:
                return None

    for found, wanted in zip(pool.map(first_other, calls, expected), expected, strict=True):
        if found is not None:
            assert_same(found, wanted, sample, "a call, with four threads at once,")


def _equal(one: object, other: object) -> bool:
    return (
        torch.equal(one, other)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        else one == other
    )

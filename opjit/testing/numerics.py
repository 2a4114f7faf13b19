"""Checks of results: the reference's, for any layout, dtype, size and thread; and no write to an unmarked argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from math import inf, nan
from random import Random
from time import thread_time
from typing import Any

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.testing.checks import Check, add, expect_one_line, tally
from opjit.testing.compare import as_list, assert_same
from opjit.testing.samples import (
    LAYOUTS,
    Skipped,
    distinct_samples,
    effects,
    emptied,
    floating,
    meta,
    replica,
    resized,
    rolled,
    samples,
    storage_bytes,
    with_layout,
)
from opjit.testing.trials import trials

# The dtypes that the check "dtypes" tries.
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64)
_DRAWN = 40  # shapes
_SIDE = 67  # of a tensor that starts at an odd element
_LARGE, _REPEATED, _REPEATED_S = 1 << 16, 200, 2.0  # elements; calls of each thread, and CPU seconds after which it makes no more
_OVERLAP_S = 0.1  # CPU seconds of each thread with large calls: longer than a busy system lets one thread run alone
CHECKS: list[Check] = []


def _compare(op: Op, sample: Sample) -> bool | None:
    """Compare op and reference: True if the op takes the call, False if it rejects it, None if the reference rejects it.

    Raises:
        AssertionError: the results differ, or the op's error is not one line.
    """
    try:
        expected = effects(op.reference_function, op, sample)
    except Exception:  # any error of the reference means that the call makes no sense
        return None
    try:
        got = effects(op.overload, op, sample)
    except RuntimeError as error:
        expect_one_line(op, error, sample)
        return False
    assert_same(got, expected, sample)
    return True


def _compare_all(op: Op, calls: Iterable[Sample], what: str) -> str:
    """Compare op and reference on calls that the op may take or reject. Returns the note."""
    known = [answer for answer in (_compare(op, call) for call in trials(calls)) if answer is not None]
    if not known:
        raise Skipped(f"the reference takes no {what} derived from the samples")
    taken = sum(known)
    return f"{taken} {what}" + (f", {len(known) - taken} rejected with a one-line error" if taken < len(known) else "")


@add(CHECKS, "inputs kept")
def _inputs(op: Op, device: str) -> str:
    """Inputs are neither changed nor aliased."""
    for sample in trials(samples(op, device)):
        sample = sample.map(replica) if op.schema.mutates else sample
        before = [(storage_bytes(t).clone(), t._version) for t in sample.tensors()]
        found = tensors_of(op.overload(*sample.args, **sample.kwargs))
        written = _written(op, sample)
        for index, (t, (content, version)) in enumerate(zip(sample.tensors(), before, strict=True)):
            if index in written:
                continue
            same = torch.equal(storage_bytes(t), content)
            assert same, f"on ({sample}) the kernel writes into tensor {index}, an input that the schema does not mark: Tensor(a!)"
            assert t._version == version, f"on ({sample}) the op raises the version of tensor {index}, which the schema does not mark"
        places = [t.untyped_storage().data_ptr() for t in (*sample.tensors(), *found) if t.untyped_storage().nbytes()]
        inputs = {t.untyped_storage().data_ptr() for t in sample.tensors() if t.untyped_storage().nbytes()}
        assert len(set(places) - inputs) == sum(r.untyped_storage().nbytes() > 0 for r in found), f"on ({sample}) two tensors share memory"
    return "nothing written, nothing shared"


@add(CHECKS, "results")
def _results(op: Op, device: str) -> str:
    """Results equal the reference's on every sample."""
    calls = samples(op, device)
    for sample in trials(calls):
        expected = effects(op.reference_function, op, sample)
        assert_same(effects(op.overload, op, sample), expected, sample)
    return tally(len(calls), "sample")


@add(CHECKS, "fake kernel")
def _fake(op: Op, device: str) -> str:
    """Results have the shapes, dtypes and strides that the fake kernel gives."""
    for sample in trials(samples(op, device)):
        own, fake = sample.map(replica), sample.map(meta)
        got = tensors_of(op.overload(*own.args, **own.kwargs))
        try:
            fake_results = tensors_of(op.overload(*fake.args, **fake.kwargs))
        except RuntimeError as error:
            if "output Tensor with data-dependent shape" in str(error):  # torch's message for new_dynamic_size()
                raise Skipped("a size of the result depends on elements, which meta tensors do not have") from None
            raise
        if not got:
            raise Skipped("the op returns no tensor")
        actual, promised = ([(r.shape, r.dtype, r.stride(), r.layout) for r in each] for each in (got, fake_results))
        assert actual == promised, (f"on ({sample}) the kernel makes {actual}, but the fake kernel {promised} "
                                    "(shape, dtype, strides, layout)")
        assert {r.device.type for r in got} == {device}, f"on ({sample}) a result is not on {device}"
        assert {r.device.type for r in fake_results} == {"meta"}, f"on ({sample}) the fake kernel's result is not on its inputs' device"
    return "shapes, dtypes, strides"


@add(CHECKS, "nan and inf")
def _special(op: Op, device: str) -> str:
    """NaN and infinities give the reference's results."""
    def calls() -> Iterator[Sample]:
        for sample in distinct_samples(op, device, 8, lambda sample: floating(sample) and all(t.numel() for t in sample.tensors()),
                                       "with floating-point elements"):
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
    calls = distinct_samples(op, device, 8, lambda sample: any(t.dim() and t.numel() for t in sample.tensors()), "with dimensions")
    longer = [call for sample in calls for call in [resized(sample, [_SIDE])] if call is not None]  # some vectors, and a rest
    return _compare_all(op, (*(_laid(sample, layout) for sample in calls for layout in _layouts(op)),
                             *(_laid(sample, "offset") for sample in longer)), "layouts")


def _written(op: Op, sample: Sample) -> set[int]:
    """The numbers of the tensors in arguments that the schema marks as written."""
    values = [*sample.args, *sample.kwargs.values()]
    names = [*(argument.name for argument in op.schema.arguments[:len(sample.args)]), *sample.kwargs]
    marked = {argument.name for argument in op.schema.arguments if argument.writes}
    owners = [name for name, value in zip(names, values, strict=True) for _ in tensors_of(value)]
    return {index for index, name in enumerate(owners) if name in marked}


def _laid(sample: Sample, layout: str) -> Sample:
    return sample.map(lambda t: with_layout(t, layout))


def _layouts(op: Op) -> list[str]:
    """An op cannot write a tensor whose elements share memory."""
    return [layout for layout in LAYOUTS if layout != "expanded" or not op.schema.mutates]


@add(CHECKS, "dtypes")
def _dtypes(op: Op, device: str) -> str:
    """Each dtype gives the reference's results, or a one-line error."""
    taken: list[str] = []
    rejected: list[str] = []
    small = distinct_samples(op, device, 2, lambda sample: 0 < sample.numel <= 1000, "of 1 to 1000 elements")

    def change(sample: Sample, dtype: torch.dtype) -> Sample:
        some, name = floating(sample), str(dtype).removeprefix("torch.")
        return sample.map(lambda t: t.to(dtype) if t.dtype.is_floating_point or not some else t, f"as {name}")

    for call in trials(change(sample, dtype) for dtype in DTYPES for sample in small):
        answer = _compare(op, call)
        if answer is not None:
            (taken if answer else rejected).append(call.note.removeprefix("as "))
    if not taken and not rejected:
        raise Skipped("the reference takes none of the dtypes")
    return f"{', '.join(dict.fromkeys(taken))}" + (f"; rejected: {', '.join(dict.fromkeys(rejected))}" if rejected else "")


@add(CHECKS, "empties")
def _empties(op: Op, device: str) -> str:
    """Tensors without dimensions and sizes of 0 give the reference's results, or a one-line error."""
    calls = distinct_samples(op, device, 6, lambda sample: all(t.numel() for t in sample.tensors()), "without empty tensors")
    return _compare_all(op, (call for sample in calls for call in emptied(sample)), "empty and 0-dim shapes")


@add(CHECKS, "drawn shapes")
def _drawn(op: Op, device: str) -> str:
    """Shapes drawn at random, the same in each run, give the reference's results, or a one-line error."""
    some = distinct_samples(op, device, 8, floating, "with floating-point elements")
    calls = [sample for sample in some if resized(sample, [1]) is not None]
    if not calls:
        raise Skipped("no sample has only floating-point tensors, so no sizes can be drawn")
    draw = Random(0)
    drawn = [resized(draw.choice(calls), [draw.choice([*range(18), 31, 64, 65]) for _ in range(4)]) for _ in range(_DRAWN)]
    laid = [_laid(call, draw.choice(["contiguous", *_layouts(op)])) for call in drawn if call is not None]
    return _compare_all(op, sorted(laid, key=lambda call: call.numel), "shapes")  # the first that fails is the smallest


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
    return [*small, *[call for sample in small for call in [resized(sample, [_side(sample)])] if call is not None][:2]]


def _side(sample: Sample) -> int:
    """The size that makes a sample's tensors large enough for calls to overlap: 2^16 elements."""
    return int(_LARGE ** (1 / max(1, *(t.dim() for t in sample.tensors()))))


def assert_same_in_threads(op: Op, sample: Sample, pool: ThreadPoolExecutor) -> None:
    """Call the op in four threads at once, each with other data, and compare with one thread's results."""
    calls = [sample.map(lambda t, by=by: rolled(t, by)) for by in range(4)]  # type: ignore[misc]
    expected = [effects(op.overload, op, call) for call in calls]

    def first_other(call: Sample, wanted: list[Any]) -> list[Any] | None:
        """The first result that is not the wanted one, if only by rounding. Between the calls is little else, so that they overlap."""
        start, least = thread_time(), _OVERLAP_S if sample.numel >= _LARGE else 0.0
        for number in count(1):
            found = effects(op.overload, op, call) if op.schema.mutates else as_list(op.overload(*call.args, **call.kwargs))
            if not all(map(_equal, found, wanted)):
                return found
            spent = thread_time() - start
            if spent > _REPEATED_S or (number >= _REPEATED and spent > least):
                break
        return None

    for found, wanted in zip(pool.map(first_other, calls, expected), expected, strict=True):
        if found is not None:
            assert_same(found, wanted, sample, "a call, with four threads at once,")


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other

"""Checks of results: the reference's, for any layout, dtype, size and thread; and no write to an unmarked argument."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import inf, nan

import torch

from opjit.declare.op import Op
from opjit.testing.checks import Check, add, expect_one_line
from opjit.testing.samples import (
    LAYOUTS,
    Sample,
    Skipped,
    assert_same,
    distinct_samples,
    effects,
    floating,
    meta,
    replica,
    resized,
    samples,
    storage_bytes,
    tensors_of,
    with_layout,
)

# The dtypes that the check "dtypes" tries.
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64)
_DRAWN = 40  # shapes that hypothesis draws
CHECKS: list[Check] = []


def _compare(op: Op, sample: Sample) -> bool | None:
    """Compare op and reference: True if the op takes the call, False if it rejects it, None if the reference rejects it.

    Raises:
        AssertionError: the results differ, or the op's error is not one line.
    """
    try:
        expected = effects(op.plain, op, sample)
    except Exception:  # any error of the reference means that the call makes no sense
        return None
    try:
        got = effects(op.overload, op, sample)
    except RuntimeError as error:
        expect_one_line(op, error, sample)
        return False
    assert_same(got, expected, sample)
    return True


def _summarise(answers: Iterable[bool | None], what: str) -> str:
    """The note on calls that the op may take or reject."""
    known = [answer for answer in answers if answer is not None]
    if not known:
        raise Skipped(f"the reference takes no {what} derived from the samples")
    taken = sum(known)
    return f"{taken} {what}" + (f", {len(known) - taken} rejected with a one-line error" if taken < len(known) else "")


@add(CHECKS, "results")
def _results(op: Op, device: str) -> str:
    """Results equal the reference's on every sample."""
    calls = samples(op, device)
    for sample in calls:
        assert_same(effects(op.overload, op, sample), effects(op.plain, op, sample), sample)
    return f"{len(calls)} samples"


@add(CHECKS, "fake kernel")
def _fake(op: Op, device: str) -> str:
    """Results have the shapes, dtypes and strides that the fake kernel gives."""
    for sample in samples(op, device):
        got = tensors_of(op.overload(*sample.map(replica).args, **sample.map(replica).kwargs))
        fake = sample.map(meta)
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
    for sample in distinct_samples(op, device, 8, lambda sample: floating(sample) and all(t.numel() for t in sample.tensors())):
        for index, tensor in enumerate(sample.tensors()):
            for special in (nan, inf, -inf) if tensor.dtype.is_floating_point else ():
                changed = replica(tensor)
                changed[(0,) * tensor.dim()] = special
                call = sample.replace(index, changed)
                assert_same(effects(op.overload, op, call), effects(op.plain, op, call), f"{sample}, {special} in tensor {index}")
    return "in every tensor"


@add(CHECKS, "inputs kept")
def _inputs(op: Op, device: str) -> str:
    """Inputs are neither changed nor aliased."""
    if op.schema.mutates:
        raise Skipped("the op writes its arguments")
    for sample in samples(op, device):
        before = [(storage_bytes(t).clone(), t._version) for t in sample.tensors()]
        found = tensors_of(op.overload(*sample.args, **sample.kwargs))
        for t, (content, version) in zip(sample.tensors(), before, strict=True):
            assert torch.equal(storage_bytes(t), content), f"on ({sample}) the kernel writes into an input that the schema does not mark"
            assert t._version == version, f"on ({sample}) the op raises the version of an input that the schema does not mark"
        places = [t.untyped_storage().data_ptr() for t in (*sample.tensors(), *found) if t.untyped_storage().nbytes()]
        inputs = {t.untyped_storage().data_ptr() for t in sample.tensors() if t.untyped_storage().nbytes()}
        assert len(set(places) - inputs) == sum(r.untyped_storage().nbytes() > 0 for r in found), f"on ({sample}) two tensors share memory"
    return "nothing written, nothing shared"


@add(CHECKS, "strides")
def _strides(op: Op, device: str) -> str:
    """Tensors that are not contiguous give the same results, or a one-line error."""
    calls = distinct_samples(op, device, 8, lambda sample: any(t.dim() and t.numel() for t in sample.tensors()))
    return _summarise((_compare(op, sample.map(lambda t, layout=layout: with_layout(t, layout)))  # type: ignore[misc]
                    for sample in calls for layout in _layouts(op)), "layouts")


def _layouts(op: Op) -> list[str]:
    """An op cannot write a tensor whose elements share memory."""
    return [layout for layout in LAYOUTS if layout != "expanded" or not op.schema.mutates]


@add(CHECKS, "dtypes")
def _dtypes(op: Op, device: str) -> str:
    """Each dtype gives the reference's results, or a one-line error."""
    taken: list[str] = []
    rejected: list[str] = []
    for dtype in DTYPES:
        for sample in distinct_samples(op, device, 2, lambda sample: 0 < sample.numel <= 1000):
            some = floating(sample)
            answer = _compare(op, sample.map(lambda t, dtype=dtype, some=some:  # type: ignore[misc]
                                            t.to(dtype) if t.dtype.is_floating_point or not some else t))
            if answer is not None:
                (taken if answer else rejected).append(str(dtype).removeprefix("torch."))
    if not taken and not rejected:
        raise Skipped("the reference takes none of the dtypes")
    return f"{', '.join(dict.fromkeys(taken))}" + (f"; rejected: {', '.join(dict.fromkeys(rejected))}" if rejected else "")


@add(CHECKS, "empties")
def _empties(op: Op, device: str) -> str:
    """A size of 0 gives the reference's results, or a one-line error."""
    def answers() -> Iterable[bool | None]:
        for sample in distinct_samples(op, device, 6, lambda sample: all(t.numel() for t in sample.tensors())):
            known = sorted({size for t in sample.tensors() for size in t.shape if size > 1}, reverse=True)
            for empty in known:
                changed = resized(sample, [0 if size == empty else size for size in known])
                if changed is not None:
                    yield _compare(op, changed)

    return _summarise(answers(), "empty shapes")


@add(CHECKS, "drawn shapes")
def _drawn(op: Op, device: str) -> str:
    """Shapes that hypothesis draws give the reference's results, or a one-line error."""
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st
    except ImportError:
        raise Skipped("hypothesis is not installed: pip install 'opjit[test]'") from None
    calls = [sample for sample in distinct_samples(op, device, 8, floating) if resized(sample, [1]) is not None]
    if not calls:
        raise Skipped("no sample has only floating-point tensors, so no sizes can be drawn")
    answers: list[bool | None] = []

    @settings(max_examples=_DRAWN, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
              phases=[Phase.generate, Phase.shrink])
    @given(st.sampled_from(range(len(calls))), st.lists(st.integers(0, 17) | st.sampled_from([31, 64, 65]), min_size=4, max_size=4),
           st.sampled_from(["contiguous", *_layouts(op)]))
    def agrees(index: int, sizes: list[int], layout: str) -> None:
        call = resized(calls[index], sizes)
        assert call is not None
        answers.append(_compare(op, call.map(lambda t: with_layout(t, layout))))

    agrees()
    return _summarise(answers, "shapes")


@add(CHECKS, "threads")
def _threads(op: Op, device: str) -> str:
    """Four threads at once get the same results."""
    calls = samples(op, device)
    expected = [effects(op.overload, op, sample) for sample in calls]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda sample: effects(op.overload, op, sample), calls))
    for sample, one, wanted in zip(calls, found, expected, strict=True):
        assert_same(one, wanted, f"{sample}, four threads")
    return "4 at once"

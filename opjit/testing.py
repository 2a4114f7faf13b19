"""``opjit test`` and a project's own pytest: every check there is for an op, on the samples that it declares.

    from opjit import testing

    [OP] = testing.load(Path(__file__).parent)

    @pytest.mark.parametrize("check", testing.CHECKS, ids=str)
    def test_op(check):
        check(OP, "cpu")

or ``testing.check(OP, "cpu")`` for all of them at once. A check returns a note, raises AssertionError with one sentence, or raises
`Skipped`, which pytest knows as a skip, where it has nothing to say about the op.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import unittest
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit import api, catalog
from opjit.op import Op
from opjit.samples import (
    LAYOUTS,
    Sample,
    Skipped,
    assert_same,
    assert_same_gradients,
    differentiable,
    floating,
    kinds,
    laid_out,
    leaves,
    listed,
    memory,
    meta,
    outcome,
    replica,
    resized,
    samples,
    tensors_of,
)

# What the check of dtypes tries. An op takes a dtype or refuses it in a sentence.
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64)
_DRAWN = 40  # shapes that hypothesis draws


class Check(NamedTuple):
    """One check.

    Attributes:
        name: as in the table.
        promise: what holds where it passes.
        run: called with an op and a device; returns a note for the table.
    """

    name: str
    promise: str
    run: Callable[[Op, str], str]

    def __call__(self, op: Op, device: str) -> None:
        """
        Raises:
            AssertionError: the op breaks the promise.
            Skipped: the check does not apply.
        """
        self.run(op, device)

    def __str__(self) -> str:
        return self.name


CHECKS: list[Check] = []


def _check(name: str) -> Callable[[Callable[[Op, str], str]], Callable[[Op, str], str]]:
    def add(run: Callable[[Op, str], str]) -> Callable[[Op, str], str]:
        CHECKS.append(Check(name, (run.__doc__ or "").strip().rstrip("."), run))
        return run

    return add


def load(folder: Path) -> list[Op]:
    """The ops of a folder, which need not be on any path."""
    return catalog.add_path(folder)


def check(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> None:
    """All checks of an op on a device.

    Raises:
        AssertionError: one line for each that failed.
    """
    failed = [line for line in results(op, device, checks) if line.status == "failed"]
    if failed:
        raise AssertionError(f"{op.qualified} on {device}:\n" + "\n".join(f"{line.name}: {line.note}" for line in failed))


class Line(NamedTuple):
    """A line of the table: a check's name, ``ok``, ``failed`` or ``skipped``, and a sentence."""

    name: str
    status: str
    note: str


def results(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> Iterable[Line]:
    """Run checks one after another.

    Raises:
        CompileError, NoKernel, …: the op cannot be built for the device.
        DeclarationError: it has no reference or no samples.
    """
    api.get(op.qualified, device)
    _ = op.plain, samples(op, device)
    return (outcome_of(each.name, lambda each=each: each.run(op, device)) for each in checks)  # type: ignore[misc]


def outcome_of(name: str, run: Callable[[], str]) -> Line:
    """The line of one check."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Line(name, "ok", run())
    except unittest.SkipTest as reason:
        return Line(name, "skipped", str(reason))
    except AssertionError as error:
        return Line(name, "failed", _sentence(error))
    except Exception as error:  # torch's checks raise what they like
        return Line(name, "failed", f"{type(error).__name__}: {_sentence(error)}")


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} …"


def _agrees(op: Op, sample: Sample) -> bool | None:
    """Whether the op takes a call, and then its results are the reference's; None where the reference itself refuses the call.

    Raises:
        AssertionError: the results differ, or the refusal is no sentence.
    """
    try:
        expected = outcome(op.plain, op, sample)
    except Exception:  # whatever the reference says to a call that makes no sense
        return None
    try:
        got = outcome(op.overload, op, sample)
    except RuntimeError as error:
        _expect_sentence(op, error, sample)
        return False
    assert_same(got, expected, sample)
    return True


def _expect_sentence(op: Op, error: RuntimeError, sample: Sample) -> str:
    message = str(error)
    if op.schema.name not in message or "\n" in message.strip():
        raise AssertionError(f"on ({sample}) the op is expected to refuse in one line that names it, and says {message!r}") from None
    return message


def _refusal(op: Op, sample: Sample) -> str:
    """The message of a call that the op must refuse."""
    try:
        outcome(op.overload, op, sample)
    except RuntimeError as error:
        return _expect_sentence(op, error, sample)
    raise AssertionError(f"on ({sample}) the op is expected to raise a RuntimeError, and gives a result")


def _judged(answers: Iterable[bool | None], what: str) -> str:
    """The note for calls that the op may take or refuse."""
    known = [answer for answer in answers if answer is not None]
    if not known:
        raise Skipped(f"the reference takes no {what} made from the samples")
    taken = sum(known)
    return f"{taken} {what}" + (f", {len(known) - taken} refused in a sentence" if taken < len(known) else "")


def _needs_backward(op: Op) -> None:
    if not differentiable(op):
        raise Skipped("the op has no backward")


# Results ------------------------------------------------------------------------------------------------------------------------


@_check("results")
def _results(op: Op, device: str) -> str:
    """Results are the reference's, on every sample."""
    calls = samples(op, device)
    for sample in calls:
        assert_same(outcome(op.overload, op, sample), outcome(op.plain, op, sample), sample)
    return f"{len(calls)} samples"


@_check("fake kernel")
def _fake(op: Op, device: str) -> str:
    """Results look as the fake kernel says."""
    for sample in samples(op, device):
        got = tensors_of(op.overload(*sample.map(replica).args, **sample.map(replica).kwargs))
        fake = sample.map(meta)
        said = tensors_of(op.overload(*fake.args, **fake.kwargs))
        if not got:
            raise Skipped("the op returns no tensor")
        looks = [[(r.shape, r.dtype, r.stride(), r.layout) for r in each] for each in (got, said)]
        assert looks[0] == looks[1], (f"on ({sample}) the kernel makes {looks[0]}, and the fake kernel says {looks[1]} "
                                      "(shape, dtype, strides, layout)")
        assert {r.device.type for r in got} == {device}, f"on ({sample}) a result is not on {device}"
        assert {r.device.type for r in said} == {"meta"}, f"on ({sample}) the fake kernel's result is not on its inputs' device"
    return "shapes, dtypes, strides"


@_check("nan and inf")
def _special(op: Op, device: str) -> str:
    """NaN and infinities come out as from the reference."""
    for sample in kinds(op, device, 8, lambda sample: floating(sample) and all(t.numel() for t in sample.tensors())):
        for index, tensor in enumerate(sample.tensors()):
            for special in (nan, inf, -inf) if tensor.dtype.is_floating_point else ():
                changed = replica(tensor)
                changed[(0,) * tensor.dim()] = special
                call = sample.replace(index, changed)
                assert_same(outcome(op.overload, op, call), outcome(op.plain, op, call), f"{sample}, {special} in tensor {index}")
    return "in every tensor"


@_check("inputs kept")
def _inputs(op: Op, device: str) -> str:
    """Inputs are neither changed nor aliased."""
    if op.schema.mutates:
        raise Skipped("the op writes its arguments")
    for sample in samples(op, device):
        before = [(memory(t).clone(), t._version) for t in sample.tensors()]
        found = tensors_of(op.overload(*sample.args, **sample.kwargs))
        for t, (content, version) in zip(sample.tensors(), before, strict=True):
            assert torch.equal(memory(t), content), f"on ({sample}) the kernel writes into an input that the schema does not mark"
            assert t._version == version, f"on ({sample}) the op says that it wrote an input that the schema does not mark"
        places = [t.untyped_storage().data_ptr() for t in (*sample.tensors(), *found) if t.untyped_storage().nbytes()]
        inputs = {t.untyped_storage().data_ptr() for t in sample.tensors() if t.untyped_storage().nbytes()}
        assert len(set(places) - inputs) == sum(r.untyped_storage().nbytes() > 0 for r in found), f"on ({sample}) two tensors share memory"
    return "nothing written, nothing shared"


@_check("strides")
def _strides(op: Op, device: str) -> str:
    """Tensors that are not contiguous give the same, or are refused in a sentence."""
    layouts = [layout for layout in LAYOUTS if layout != "expanded" or not op.schema.mutates]
    calls = kinds(op, device, 8, lambda sample: any(t.dim() and t.numel() for t in sample.tensors()))
    return _judged((_agrees(op, sample.map(lambda t, layout=layout: laid_out(t, layout)))  # type: ignore[misc]
                    for sample in calls for layout in layouts), "layouts")


@_check("dtypes")
def _dtypes(op: Op, device: str) -> str:
    """Each dtype gives the reference's result, or is refused in a sentence."""
    taken: list[str] = []
    refused: list[str] = []
    for dtype in DTYPES:
        for sample in kinds(op, device, 2, lambda sample: 0 < sample.numel <= 1000):
            some = floating(sample)
            answer = _agrees(op, sample.map(lambda t, dtype=dtype, some=some:  # type: ignore[misc]
                                            t.to(dtype) if t.dtype.is_floating_point or not some else t))
            if answer is not None:
                (taken if answer else refused).append(str(dtype).removeprefix("torch."))
    if not taken and not refused:
        raise Skipped("the reference takes none of the dtypes")
    return f"{', '.join(dict.fromkeys(taken))}" + (f"; refused: {', '.join(dict.fromkeys(refused))}" if refused else "")


@_check("empties")
def _empties(op: Op, device: str) -> str:
    """A size of 0 gives the reference's result, or is refused in a sentence."""
    def answers() -> Iterable[bool | None]:
        for sample in kinds(op, device, 6, lambda sample: all(t.numel() for t in sample.tensors())):
            known = sorted({size for t in sample.tensors() for size in t.shape if size > 1}, reverse=True)
            for empty in known:
                changed = resized(sample, [0 if size == empty else size for size in known])
                if changed is not None:
                    yield _agrees(op, changed)

    return _judged(answers(), "empty shapes")


@_check("drawn shapes")
def _drawn(op: Op, device: str) -> str:
    """Shapes that hypothesis draws give the reference's results, or are refused in a sentence."""
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st
    except ImportError:
        raise Skipped("hypothesis is not installed: pip install 'opjit[test]'") from None
    calls = [sample for sample in kinds(op, device, 8, floating) if resized(sample, [1]) is not None]
    if not calls:
        raise Skipped("no sample has floating tensors only, whose sizes could be drawn")
    answers: list[bool | None] = []
    layouts = ["contiguous", *(layout for layout in LAYOUTS if layout != "expanded" or not op.schema.mutates)]

    @settings(max_examples=_DRAWN, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
              phases=[Phase.generate, Phase.shrink])
    @given(st.sampled_from(range(len(calls))), st.lists(st.integers(0, 17) | st.sampled_from([31, 64, 65]), min_size=4, max_size=4),
           st.sampled_from(layouts))
    def agrees(index: int, sizes: list[int], layout: str) -> None:
        call = resized(calls[index], sizes)
        assert call is not None
        answers.append(_agrees(op, call.map(lambda t: laid_out(t, layout))))

    agrees()
    return _judged(answers, "shapes")


@_check("threads")
def _threads(op: Op, device: str) -> str:
    """Other threads get the same results."""
    calls = samples(op, device)
    expected = [outcome(op.overload, op, sample) for sample in calls]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda sample: outcome(op.overload, op, sample), calls))
    for sample, one, wanted in zip(calls, found, expected, strict=True):
        assert_same(one, wanted, f"{sample}, four threads")
    return "4 at once"


# torch's checks and tracers -------------------------------------------------------------------------------------------------------


@_check("opcheck")
def _opcheck(op: Op, device: str) -> str:
    """torch.library.opcheck is satisfied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # opcheck looks at it
        for sample in kinds(op, device, 12):
            torch.library.opcheck(op.overload, sample.map(replica).args, sample.map(replica).kwargs)
        if differentiable(op):
            for sample in kinds(op, device, 4, floating):
                args, kwargs = leaves(sample)
                torch.library.opcheck(op.overload, args, kwargs)
    return "schema, fake kernel, autograd, AOT"


@_check("gradients")
def _gradients(op: Op, device: str) -> str:
    """Gradients are the reference's."""
    _needs_backward(op)
    compared = sum(assert_same_gradients(sample, op.plain, op.overload) for sample in samples(op, device))
    if not compared:
        raise Skipped("the reference is a step and has no gradient; the one that the op gives is a test of the op's own")
    return f"{compared} samples"


@_check("gradcheck")
def _gradcheck(op: Op, device: str) -> str:
    """torch.autograd.gradcheck holds in float64 where it holds for the reference."""
    _needs_backward(op)
    checked = 0
    for sample in kinds(op, device, 8, lambda sample: sample.numel <= 500 and any(t.dtype == torch.float64 for t in sample.tensors())):
        inputs = sample.map(lambda t: t.detach().clone().requires_grad_(t.dtype == torch.float64))
        values, spec = tree_flatten(tuple(inputs))
        slopes = any(r.requires_grad for r in tensors_of(op.plain(*inputs.args, **inputs.kwargs)))

        def passes(call: Callable[..., Any], fast: bool, complain: bool, spec: Any = spec, values: list[Any] = values) -> bool:
            def rebuilt(*changed: Any) -> Any:
                args, kwargs = tree_unflatten(list(changed), spec)
                return tuple(r for r in tensors_of(call(*args, **kwargs)) if r.requires_grad)

            return torch.autograd.gradcheck(rebuilt, values, fast_mode=fast, raise_exception=complain)

        if slopes and passes(op.plain, True, False):
            assert passes(op.overload, sample.numel > 100, True)
            checked += 1
    if not checked:
        raise Skipped("the reference's gradient is not its slope")
    return f"{checked} float64 samples"


def _compiled(op: Op, device: str, dynamic: bool | None) -> str:
    calls = kinds(op, device, 4)
    for sample in calls:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, backend="aot_eager", dynamic=dynamic)
        with torch.no_grad():
            assert_same(outcome(compiled, op, sample), outcome(op.overload, op, sample), sample)
        if differentiable(op):
            assert_same_gradients(sample, op.overload, compiled)
    return f"fullgraph, {len(calls)} samples"


@_check("compile static")
def _compile_static(op: Op, device: str) -> str:
    """Compiled by torch.compile in one graph it gives the same."""
    return _compiled(op, device, None)


@_check("compile dynamic")
def _compile_dynamic(op: Op, device: str) -> str:
    """Compiled with symbolic shapes it gives the same."""
    return _compiled(op, device, True)


class _Call(torch.nn.Module):
    """A call whose tensors are the module's inputs."""

    def __init__(self, op: Op, sample: Sample) -> None:
        super().__init__()
        self.overload = op.overload
        self.values, self.spec = tree_flatten(tuple(sample))

    def forward(self, *tensors: torch.Tensor) -> Any:
        waiting = iter(tensors)
        args, kwargs = tree_unflatten([next(waiting) if isinstance(v, torch.Tensor) else v for v in self.values], self.spec)
        return self.overload(*args, **kwargs)


def _exported(op: Op, device: str, strict: bool) -> str:
    calls = kinds(op, device, 4)
    for sample in calls:
        torch._dynamo.reset()
        program = torch.export.export(_Call(op, sample), tuple(sample.map(replica).tensors()), strict=strict)
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert called.count(op.overload) == 1, f"on ({sample}) the exported graph calls {called}"
        module = program.module()
        assert_same(outcome(lambda *args, **kwargs: module(*Sample(args, kwargs).tensors()), op, sample),  # noqa: B023
                    outcome(op.overload, op, sample), sample)
    return f"one node, {len(calls)} samples"


@_check("export")
def _export(op: Op, device: str) -> str:
    """Exported it is one node and gives the same."""
    return _exported(op, device, False)


@_check("export strict")
def _export_strict(op: Op, device: str) -> str:
    """Exported in strict mode it is one node and gives the same."""
    return _exported(op, device, True)


# Bad input ----------------------------------------------------------------------------------------------------------------------


def _with_dimensions(op: Op, device: str) -> Sample:
    return kinds(op, device, 1, lambda sample: all(t.dim() for t in sample.tensors()))[0]


@_check("two devices")
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


@_check("sparse")
def _sparse(op: Op, device: str) -> str:
    """A sparse tensor is refused in a sentence."""
    sample = _with_dimensions(op, device)
    for index, tensor in enumerate(sample.tensors()):
        told = _refusal(op, sample.replace(index, torch.zeros_like(tensor).to_sparse()))
        assert "takes dense tensors" in told, f"a sparse tensor is refused with {told!r}"
    return "refused in a sentence"


@_check("float8")
def _float8(op: Op, device: str) -> str:
    """A dtype without arithmetic is refused in a sentence."""
    for sample in kinds(op, device, 1, lambda sample: sample.numel > 0):
        for index, tensor in enumerate(sample.tensors()):
            _refusal(op, sample.replace(index, torch.zeros_like(tensor, dtype=torch.float8_e4m3fn)))
    return "refused in a sentence"


# CUDA ---------------------------------------------------------------------------------------------------------------------------


def _filled_later(sample: Sample) -> tuple[Sample, Callable[[], None]]:
    """A copy whose memory holds zeros, and what fills it."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make(tensor: torch.Tensor) -> torch.Tensor:
        copy = replica(tensor)
        memory(copy).zero_()
        copies.append((copy, tensor))
        return copy

    def fill() -> None:
        for copy, tensor in copies:
            memory(copy).copy_(memory(tensor))

    return sample.map(make), fill


def _left(op: Op, sample: Sample) -> list[Any]:
    """Like `outcome`, in place."""
    return [*listed(op.overload(*sample.args, **sample.kwargs)), *(sample.tensors() if op.schema.mutates else [])]


def _needs_cuda(device: str) -> None:
    if device != "cuda":
        raise Skipped("for CUDA")


@_check("cuda graph")
def _cuda_graph(op: Op, device: str) -> str:
    """Captured in a CUDA graph on zeros and replayed on the samples, it gives the same."""
    _needs_cuda(device)
    if op.schema.mutates:
        raise Skipped("the op writes its arguments, so a second replay is another call")
    expected = [outcome(op.overload, op, sample) for sample in samples(op, device)]
    calls = [_filled_later(sample) for sample in samples(op, device)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [_left(op, sample) for sample, _ in calls]
    for _, fill in calls:
        fill()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted, (sample, _) in zip(found, expected, calls, strict=True):
            assert_same(got, wanted, sample)
    return f"{len(calls)} samples"


@_check("cuda stream")
def _cuda_stream(op: Op, device: str) -> str:
    """The current stream is the one used: the samples arrive on it after a while, and on any other the op would read zeros."""
    _needs_cuda(device)
    expected = [outcome(op.overload, op, sample) for sample in samples(op, device)]
    calls = [_filled_later(sample) for sample in samples(op, device)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for _, fill in calls:
            fill()
        found = [_left(op, sample) for sample, _ in calls]
    side.synchronize()
    for got, wanted, (sample, _) in zip(found, expected, calls, strict=True):
        assert_same(got, wanted, sample)
    return f"{len(calls)} samples"


# The command --------------------------------------------------------------------------------------------------------------------


def run(names: Sequence[str], device: str | None, sanitizers: Sequence[str]) -> int:
    """Print a table for each op and device; returns the command's exit code.

    Args:
        names: of ops, or paths of their folders.
        sanitizers: such as ``"address"`` or ``"memcheck"``, for the kinds of device that they are for.
    """
    from opjit import sanitize

    failed = 0
    with tempfile.TemporaryDirectory(prefix="opjit-") as scratch:
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)  # or it would be a folder in the user's
        for op in (op for name in names for op in catalog.named(name)):
            for each in [device] if device else op.devices():
                print(f"{op.qualified} on {each}", flush=True)
                for line in itertools.chain(results(op, each), sanitize.lines(op, each, sanitizers)):
                    failed += line.status == "failed"
                    print(f"  {line.status:<8} {line.name:<18} {line.note}", flush=True)
    print(f"{failed} failed" if failed else "all hold")
    return 1 if failed else 0

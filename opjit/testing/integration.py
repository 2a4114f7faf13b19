"""Checks of an op within torch: its fake kernel, opcheck, torch.compile, torch.export and torch.vmap, CUDA graphs and streams."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.declare.sample import Sample
from opjit.operators.op import Op
from opjit.progress import tally
from opjit.tensors import replica, storage_bytes, tensors_of
from opjit.testing.checks import Check, add
from opjit.testing.compare import as_list, assert_same
from opjit.testing.gradients import assert_same_gradients, with_gradients
from opjit.testing.samples import (
    FLOAT8,
    Skipped,
    called,
    distinct_samples,
    effects,
    effects_in_place,
    floating,
    results_of,
    rolled,
    trials,
)

CHECKS = list[Check]()
_TIMEOUT_FACTOR = 12


@add(CHECKS, "fake kernel")
def _fake(op: Op, device: str) -> str:
    """Results have the shapes, dtypes and strides that the fake kernel gives."""
    for sample in trials(op.samples_on(device)):
        own = sample.map(replica)
        fake = sample.map(
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        )
        got = tensors_of(called(op.overload, own))
        try:
            promised = tensors_of(called(op.overload, fake))
        except RuntimeError as error:
            # torch's message for new_dynamic_size().
            if "output Tensor with data-dependent shape" not in str(error):
                raise
            raise Skipped(
                "a size of the result depends on elements, which meta tensors do not have"
            ) from None
        if not got:
            raise Skipped("the op returns no tensor")
        made, wanted = (
            [(r.shape, r.dtype, r.stride(), r.layout) for r in each] for each in (got, promised)
        )
        assert made == wanted, (
            f"on ({sample}) the kernel makes {made}, but the fake kernel {wanted} "
            "(shape, dtype, strides, layout)"
        )
        assert {r.device.type for r in got} == {device}, (
            f"on ({sample}) a result is not on {device}"
        )
        assert op.schema.returned or not {*map(id, promised)} & {*map(id, fake.tensors())}, (
            f"on ({sample}) the fake kernel returns its argument, but the kernel returns a new tensor; "
            "return one such as x.new_empty(x.shape)"
        )
        assert {r.device.type for r in promised} == {"meta"}, (
            f"on ({sample}) the fake kernel's result is not on its inputs' device"
        )
    return "shapes, dtypes, strides"


@add(CHECKS, "opcheck", _TIMEOUT_FACTOR)
def _opcheck(op: Op, device: str) -> str:
    """torch.library.opcheck passes."""
    with warnings.catch_warnings():
        # Opcheck reads it.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        # It compares copies.
        calls = distinct_samples(
            op,
            device,
            12,
            lambda sample: not any(t.dtype in FLOAT8 for t in sample.tensors()),
            "without float8",
        )
        calls = [sample.map(replica) for sample in calls]
        if op.declaration.differentiable:
            continuous = distinct_samples(op, device, 4, floating, "with floating-point elements")
            calls += map(with_gradients, continuous)
        for call in trials(calls):
            torch.library.opcheck(op.overload, call.args, call.kwargs)
    return "schema, fake kernel, autograd, AOT"


@add(CHECKS, "compile", _TIMEOUT_FACTOR)
def _compile(op: Op, device: str) -> str:
    """torch.compile captures the op in one graph, with the same results, for fixed and for
    symbolic shapes.
    """
    calls = distinct_samples(op, device, 4)
    for sample in trials(calls):
        for dynamic in (None, True):
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda *args, **kwargs: op.overload(*args, **kwargs),
                fullgraph=True,
                backend="aot_eager",
                dynamic=dynamic,
            )
            with torch.no_grad():
                expected = results_of(op, sample)
                what = f"torch.compile with dynamic={dynamic}"
                assert_same(effects(compiled, op, sample), expected, sample, what)
            if op.declaration.differentiable:
                assert_same_gradients(sample, op.overload, compiled)
    return "fullgraph"


class _Call(torch.nn.Module):
    """A module that calls the op with given tensors.

    All other arguments are constants, because a model has them so, and because
    torch.export accepts no dtype as an input.
    """

    def __init__(self, op: Op, sample: Sample) -> None:
        super().__init__()
        self.overload = op.overload
        self.values, self.spec = tree_flatten(sample.values)

    def forward(self, *tensors: Tensor) -> Any:
        waiting = iter(tensors)
        values = [next(waiting) if isinstance(value, Tensor) else value for value in self.values]
        args, kwargs = tree_unflatten(values, self.spec)
        return self.overload(*args, **kwargs)


@add(CHECKS, "export", _TIMEOUT_FACTOR)
def _export(op: Op, device: str) -> str:
    """After an export, strict or not, the op is one node with the same results."""
    calls = distinct_samples(op, device, 4)
    for sample in trials(calls):
        for strict in (False, True):
            torch._dynamo.reset()
            own = sample.map(replica)
            program = torch.export.export(_Call(op, own), tuple(own.tensors()), strict=strict)
            called = [node.target for node in program.graph.nodes if node.op == "call_function"]
            assert called.count(op.overload) == 1, (
                f"on ({sample}) the exported graph calls {called}"
            )
            module = program.module()

            def exported(*args: Any, module: Any = module, **kwargs: Any) -> Any:
                return module(*tensors_of((args, kwargs)))

            expected = results_of(op, sample)
            assert_same(effects(exported, op, sample), expected, sample)
    return "one node"


@add(CHECKS, "vmap")
def _vmap(op: Op, device: str) -> str:
    """torch.vmap gives the results of a call for each element of the batch."""
    if not op.declaration.batches:
        raise Skipped(
            "the op lacks a rule for torch.vmap: declare it with elementwise=True, or add @vmap"
        )
    calls = distinct_samples(
        op,
        device,
        8,
        lambda sample: bool(tensors_of(sample.args)) and not tensors_of(sample.kwargs),
        "without tensors by name",
    )
    for sample in trials(calls):
        others = (len(tensors_of(sample.args)) - 1) * (None,)
        same = (len(others) + 1) * (0,)
        ends = (len(others) + 1) * (-1,)
        for dims in {same, ends, (0, *others), (*others, 0)}:
            _compare_with_loop(op, sample, dims)
    return tally(len(calls), "sample")


def _compare_with_loop(op: Op, sample: Sample, dims: tuple[int | None, ...]) -> None:
    """Compare a batch of three with three calls; tensors without a dimension in `dims` are the same in each."""
    values, spec = tree_flatten(sample.args)
    waiting = iter(dims)
    places = [next(waiting) if isinstance(value, Tensor) else None for value in values]
    batched = [
        value if place is None else torch.stack([value, rolled(value, 1), value], place)
        for value, place in zip(values, places, strict=True)
    ]

    def call(*flat: Any) -> Any:
        return op.overload(*tree_unflatten(list(flat), spec), **sample.kwargs)

    def element(number: int) -> list[Any]:
        return [
            each if place is None else each.select(place, number)
            for each, place in zip(batched, places, strict=True)
        ]

    try:
        one_by_one = [as_list(call(*element(number))) for number in range(3)]
    except RuntimeError:
        if all(each.is_contiguous() for each in tensors_of(element(0))):
            raise
        return  # the op rejects these strides, which the check "strides" covers
    got = torch.vmap(call, in_dims=tuple(places))(*batched)
    expected = [torch.stack(results) for results in zip(*one_by_one, strict=True)]
    assert_same(as_list(got), expected, sample, f"torch.vmap with in_dims={dims}")


def _zeros(tensor: Tensor) -> Tensor:
    """Zeros, with the same strides and gaps."""
    copy = replica(tensor)
    storage_bytes(copy).zero_()
    return copy


def _fill(copies: list[Sample], calls: list[Sample]) -> None:
    for copy, sample in zip(copies, calls, strict=True):
        for to, tensor in zip(copy.tensors(), sample.tensors(), strict=True):
            storage_bytes(to).copy_(storage_bytes(tensor))


def _assert_all_same(
    calls: list[Sample], found: list[list[Any]], expected: list[list[Any]]
) -> None:
    torch.cuda.synchronize()
    for sample, got, wanted in zip(calls, found, expected, strict=True):
        assert_same(got, wanted, sample)


@add(CHECKS, "cuda graph", device="cuda")
def _cuda_graph(op: Op, device: str) -> str:
    """A CUDA graph captured on zeros gives the same results when it is replayed on the samples."""
    if op.schema.mutates:
        raise Skipped("the op writes its arguments, so each replay starts from other values")
    calls = list(trials(op.samples_on(device)))
    expected = [results_of(op, sample) for sample in calls]
    copies = [sample.map(_zeros) for sample in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [effects_in_place(op.overload, op, sample) for sample in copies]
    _fill(copies, calls)
    for _ in range(2):
        graph.replay()
        _assert_all_same(calls, found, expected)
    return tally(len(calls), "sample")


@add(CHECKS, "cuda stream", device="cuda")
def _cuda_stream(op: Op, device: str) -> str:
    """The op runs on the current stream: the data arrives there late, so on any other stream the op would read zeros."""
    calls = list(trials(op.samples_on(device)))
    expected = [results_of(op, sample) for sample in calls]
    copies = [sample.map(_zeros) for sample in calls]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        _fill(copies, calls)
        found = [effects_in_place(op.overload, op, sample) for sample in copies]
    _assert_all_same(calls, found, expected)
    return tally(len(calls), "sample")

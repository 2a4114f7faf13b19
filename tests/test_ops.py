"""One table for every op, on each device that it has a kernel for: the samples it declares are called, compiled, exported,
differentiated and captured, and held against its reference. An op that is added to kernels_c is in the table.

The tests' own ops are in it too: `parts` and `joined` have several results and several Tensor arguments, and share a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from opjit import Op, catalog
from tests.helpers import BUNDLED

OPS = Path(__file__).parent / "ops"
for _folder in ("double", "parts"):
    catalog.declare_folder(OPS / _folder)
OWN = ["optest::parts", "optest::joined"]


class Sample(NamedTuple):
    """One call of an op."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        return [value for value in tree_flatten(tuple(self))[0] if isinstance(value, torch.Tensor)]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        """The same call with every tensor changed."""
        return Sample(*tree_map(lambda value: change(value) if isinstance(value, torch.Tensor) else value, tuple(self)))

    def replace(self, index: int, tensor: torch.Tensor) -> Sample:
        """The same call with another tensor in one place."""
        tensors = iter(range(len(self.tensors())))
        return self.map(lambda value: tensor if next(tensors) == index else value)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What makes a sample worth a test of its own."""
        return (*((t.dtype, t.dim(), t.is_contiguous(), t.numel() == 0) for t in self.tensors()), str(self.kwargs))

    @property
    def numel(self) -> int:
        return sum(t.numel() for t in self.tensors())


def _cases() -> Iterator[Any]:
    """Every op on every device that it has a source for; double's CUDA kernel takes less than its samples."""
    for name in [*BUNDLED, "optest::double", *OWN]:
        for device in ("cpu",) if name == "optest::double" else catalog.find(name).backends():
            yield pytest.param(name, device, id=f"{name.partition('::')[2]}-{device}", marks=pytest.mark.gpu if device == "cuda" else ())


# What torch 2.11 says of itself when torch._dynamo.reset() imports inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
every_op = pytest.mark.parametrize(("name", "device"), list(_cases()))
every_cuda_op = pytest.mark.parametrize("name", [name for name in (*BUNDLED, *OWN) if "cuda" in catalog.find(name).backends()])


def samples(op: Op, device: str) -> list[Sample]:
    return [Sample(*sample) for sample in op.sample(device)]


def kinds(op: Op, device: str, most: int, keep: Callable[[Sample], bool] = lambda sample: True) -> list[Sample]:
    """At most so many small samples, no two of a kind, from all over the declared ones."""
    found: dict[tuple[Any, ...], Sample] = {}
    for sample in samples(op, device):
        if sample.numel <= 10_000 and keep(sample):
            found.setdefault(sample.kind, sample)
    one_of_each = list(found.values())
    assert one_of_each, f"{op.qualified} declares no such sample"
    step = max(1.0, len(one_of_each) / most)
    return [one_of_each[int(index * step)] for index in range(min(most, len(one_of_each)))]


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def assert_same(got: Any, expected: Any) -> None:
    """torch's own tolerances; the structure, dtypes and devices too."""
    torch.testing.assert_close(listed(got), listed(expected), equal_nan=True)


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes that a tensor's storage has, also the ones between its elements."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def replica(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same elements, strides and gaps, in memory of its own."""
    storage = memory(tensor).clone().untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def floating(sample: Sample) -> bool:
    return any(t.dtype.is_floating_point for t in sample.tensors())


def differentiable(op: Op) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified, "Autograd")


def leaves(sample: Sample) -> Sample:
    return sample.map(lambda t: t.detach().requires_grad_(t.dtype.is_floating_point))


def gradients(sample: Sample, *calls: Callable[..., Any]) -> list[list[torch.Tensor | None]]:
    """The floating inputs' gradients from each call, for results that all count differently. Only results that every call can
    differentiate count: an op may mark one of its own as not differentiable. Nothing where no result is."""
    with torch.no_grad():
        if not any(result.dtype.is_floating_point for result in listed(calls[0](*sample.args, **sample.kwargs))):
            return []  # torch's own ops raise for a result that cannot have a gradient
    inputs = [leaves(sample) for _ in calls]
    results = [listed(call(*own.args, **own.kwargs)) for call, own in zip(calls, inputs, strict=True)]
    counted = [index for index, found in enumerate(zip(*results, strict=True)) if all(r.requires_grad for r in found)]
    if not counted:
        return []
    shown = [results[0][index] for index in counted]
    seeds = [torch.linspace(-1, 2, r.numel(), device=r.device, dtype=torch.float64).cos().to(r.dtype).reshape(r.shape) for r in shown]
    return [list(torch.autograd.grad([found[index] for index in counted], [t for t in own.tensors() if t.requires_grad], seeds,
                                     allow_unused=True)) for found, own in zip(results, inputs, strict=True)]


def assert_same_gradients(sample: Sample, *calls: Callable[..., Any]) -> bool:
    """Whether there are any."""
    found = gradients(sample, *calls)
    for other in found[1:]:
        assert [gradient is None for gradient in other] == [gradient is None for gradient in found[0]]
        assert_same([g for g in other if g is not None], [g for g in found[0] if g is not None])
    return bool(found)


# What an op declares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_op_declares_all_that_the_table_needs(name: str) -> None:
    op = catalog.find(name)
    declared = [t for sample in samples(op, "cpu") for t in sample.tensors()]
    assert callable(op.plain)
    assert {"cpu", "cuda"} <= set(op.backends())
    assert any(t.numel() == 0 for t in declared), "no empty tensor"
    assert any(not t.is_contiguous() for t in declared), "no strided tensor"
    assert {torch.float32, torch.float64} <= {t.dtype for t in declared}
    assert next(op.work("cpu"), None) is not None, "no workload"


# Results ------------------------------------------------------------------------------------------------------------------------


@every_op
def test_results_are_the_references(name: str, device: str) -> None:
    op = catalog.find(name)
    for args, kwargs in samples(op, device):
        assert_same(op(*args, **kwargs), op.plain(*args, **kwargs))


@every_op
def test_results_look_as_the_fake_kernel_says(name: str, device: str) -> None:
    op = catalog.find(name)
    for sample in samples(op, device):
        got, fake = (listed(op(*call.args, **call.kwargs)) for call in (sample, sample.map(meta)))
        assert [(r.shape, r.dtype, r.stride(), r.layout) for r in got] == [(r.shape, r.dtype, r.stride(), r.layout) for r in fake]
        assert {r.device.type for r in got} == {device}
        assert {r.device.type for r in fake} == {"meta"}


@every_op
def test_nan_and_infinities_come_out_as_from_the_reference(name: str, device: str) -> None:
    op = catalog.find(name)
    for sample in kinds(op, device, 8, lambda sample: floating(sample) and all(t.numel() for t in sample.tensors())):
        for index, tensor in enumerate(sample.tensors()):
            for special in (nan, inf, -inf) if tensor.dtype.is_floating_point else ():
                changed = replica(tensor)
                changed[(0,) * tensor.dim()] = special
                args, kwargs = sample.replace(index, changed)
                assert_same(op(*args, **kwargs), op.plain(*args, **kwargs))


@every_op
def test_inputs_are_neither_changed_nor_aliased(name: str, device: str) -> None:
    op = catalog.find(name)
    for sample in samples(op, device):
        before = [(memory(t).clone(), t._version) for t in sample.tensors()]
        results = listed(op(*sample.args, **sample.kwargs))
        for t, (content, version) in zip(sample.tensors(), before, strict=True):
            assert torch.equal(memory(t), content)
            assert t._version == version
        places = [t.untyped_storage().data_ptr() for t in (*sample.tensors(), *results) if t.untyped_storage().nbytes()]
        inputs = {t.untyped_storage().data_ptr() for t in sample.tensors() if t.untyped_storage().nbytes()}
        assert len(set(places) - inputs) == sum(r.untyped_storage().nbytes() > 0 for r in results)


@every_op
def test_other_threads_get_the_same_results(name: str, device: str) -> None:
    op = catalog.find(name)
    calls = samples(op, device)
    expected = [op(*args, **kwargs) for args, kwargs in calls]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda sample: op(*sample.args, **sample.kwargs), calls))
    assert_same([r for one in found for r in listed(one)], [r for one in expected for r in listed(one)])


# torch's checks and tracers -------------------------------------------------------------------------------------------------------


@every_op
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck looks at it
def test_opcheck(name: str, device: str) -> None:
    op = catalog.find(name)
    for sample in kinds(op, device, 12):
        torch.library.opcheck(op.overload, sample.args, sample.kwargs)
    if differentiable(op):
        for sample in kinds(op, device, 4, floating):
            args, kwargs = leaves(sample)
            torch.library.opcheck(op.overload, args, kwargs)


@every_op
def test_gradients_are_the_references(name: str, device: str) -> None:
    op = catalog.find(name)
    if not differentiable(op):
        pytest.skip("has no backward")
    compared = [assert_same_gradients(sample, op.plain, op.overload) for sample in samples(op, device)]
    if not any(compared):
        pytest.skip("the reference is a step and has no gradient; the one that the op gives is a test of the op's own")


@every_op
def test_gradcheck_holds_where_it_holds_for_the_reference(name: str, device: str) -> None:
    op = catalog.find(name)
    if not differentiable(op):
        pytest.skip("has no backward")
    checked = 0
    for sample in kinds(op, device, 8, lambda sample: sample.numel <= 500 and any(t.dtype == torch.float64 for t in sample.tensors())):
        inputs = sample.map(lambda t: t.detach().clone().requires_grad_(t.dtype == torch.float64))
        values, spec = tree_flatten(tuple(inputs))
        slopes = any(r.requires_grad for r in listed(op.plain(*inputs.args, **inputs.kwargs)))

        def passes(call: Callable[..., Any], fast: bool, complain: bool, spec: Any = spec, values: list[Any] = values) -> bool:
            def rebuilt(*changed: Any) -> Any:
                args, kwargs = tree_unflatten(list(changed), spec)
                return tuple(r for r in listed(call(*args, **kwargs)) if r.requires_grad)

            return torch.autograd.gradcheck(rebuilt, values, fast_mode=fast, raise_exception=complain)

        if slopes and passes(op.plain, True, False):
            assert passes(op.overload, sample.numel > 100, True)
            checked += 1
    if not checked:
        pytest.skip("the reference's gradient is not its slope")


@every_op
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compiled_it_gives_the_same(name: str, device: str, dynamic: bool | None) -> None:
    op = catalog.find(name)
    for sample in kinds(op, device, 4):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, backend="aot_eager", dynamic=dynamic)
        with torch.no_grad():
            assert_same(compiled(*sample.args, **sample.kwargs), op(*sample.args, **sample.kwargs))
        if differentiable(op):
            assert_same_gradients(sample, op.overload, compiled)


class Call(torch.nn.Module):
    """A call whose tensors are the module's inputs."""

    def __init__(self, op: Op, sample: Sample) -> None:
        super().__init__()
        self.overload = op.overload
        self.values, self.spec = tree_flatten(tuple(sample))

    def forward(self, *tensors: torch.Tensor) -> Any:
        waiting = iter(tensors)
        args, kwargs = tree_unflatten([next(waiting) if isinstance(v, torch.Tensor) else v for v in self.values], self.spec)
        return self.overload(*args, **kwargs)


@every_op
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported_it_is_one_node_and_gives_the_same(name: str, device: str, strict: bool) -> None:
    op = catalog.find(name)
    for sample in kinds(op, device, 4):
        torch._dynamo.reset()
        program = torch.export.export(Call(op, sample), tuple(sample.tensors()), strict=strict)
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert called.count(op.overload) == 1
        assert_same(program.module()(*sample.tensors()), op(*sample.args, **sample.kwargs))


# Bad input ----------------------------------------------------------------------------------------------------------------------


def refusal(op: Op, sample: Sample) -> str:
    """The message of a refused call: one line, and it names the op."""
    with pytest.raises(RuntimeError) as caught:
        op(*sample.args, **sample.kwargs)
    message = str(caught.value)
    assert op.schema.name in message
    assert "\n" not in message.strip()
    return message


@every_op
def test_tensors_on_two_devices_are_refused_in_a_sentence(name: str, device: str) -> None:
    op = catalog.find(name)
    sample = kinds(op, device, 1, lambda sample: all(t.dim() for t in sample.tensors()))[0]
    if len(sample.tensors()) < 2:
        pytest.skip("takes one tensor")
    for index, tensor in enumerate(sample.tensors()):
        for other in ("meta", "cpu" if device == "cuda" else "meta"):
            assert "expected all tensors on one device" in refusal(op, sample.replace(index, tensor.to(other)))


@every_op
def test_a_sparse_tensor_is_refused_in_a_sentence(name: str, device: str) -> None:
    op = catalog.find(name)
    sample = kinds(op, device, 1, lambda sample: all(t.dim() for t in sample.tensors()))[0]
    for index, tensor in enumerate(sample.tensors()):
        assert "takes dense tensors" in refusal(op, sample.replace(index, torch.zeros_like(tensor).to_sparse()))


@every_op
def test_a_dtype_without_arithmetic_is_refused_in_a_sentence(name: str, device: str) -> None:
    op = catalog.find(name)
    for sample in kinds(op, device, 1, lambda sample: sample.numel > 0):
        for index, tensor in enumerate(sample.tensors()):
            assert refusal(op, sample.replace(index, torch.zeros_like(tensor, dtype=torch.float8_e4m3fn)))


# CUDA ---------------------------------------------------------------------------------------------------------------------------


def filled_later(sample: Sample) -> tuple[Sample, Callable[[], None]]:
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


@pytest.mark.gpu
@every_cuda_op
def test_a_cuda_graph_gives_the_same_results(name: str) -> None:
    """Captured on zeros, replayed on the samples."""
    op = catalog.find(name)
    expected = [op(*args, **kwargs) for args, kwargs in samples(op, "cuda")]
    calls = [filled_later(sample) for sample in samples(op, "cuda")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [op(*sample.args, **sample.kwargs) for sample, _ in calls]
    for _, fill in calls:
        fill()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted in zip(results, expected, strict=True):
            assert_same(got, wanted)


@pytest.mark.gpu
@every_cuda_op
def test_the_current_stream_is_the_one_used(name: str) -> None:
    """The samples arrive on a side stream after a while; on any other stream the op would read zeros."""
    op = catalog.find(name)
    expected = [op(*args, **kwargs) for args, kwargs in samples(op, "cuda")]
    calls = [filled_later(sample) for sample in samples(op, "cuda")]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for _, fill in calls:
            fill()
        results = [op(*sample.args, **sample.kwargs) for sample, _ in calls]
    side.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        assert_same(got, wanted)

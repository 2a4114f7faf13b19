"""The calls that check an op: its samples, and variants of them with other layouts and sizes. `trials` yields them one by one."""

import itertools
import math
import unittest
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.declare.declaration import Function
from opjit.declare.sample import Sample
from opjit.errors import DeclarationError
from opjit.operators.op import Op
from opjit.tensors import replica
from opjit.testing.compare import as_list

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("transposed", "gaps", "offset", "expanded")
SMALL = 10_000  # elements
LARGE = 1 << 16  # elements: enough for calls to overlap, and for opjit_parallel_for to split
_KINDS = 8  # of samples that are tried when a large call is needed
_WAYS = 64  # to make some of several equal sizes larger
_EXTREME = {int: (-1000, -1, 0, 1000), float: (-1000.0, 1000.0)}  # some are out of any range


class Skipped(unittest.SkipTest):
    """A check does not apply to an op. The text contains the reason, and pytest reports a skip."""


class ReferenceFailed(AssertionError):
    """The op's reference raised an error on a sample. The text names the error and the sample."""


@dataclass
class CallWatch:
    """Follows the calls of a check.

    Attributes:
        say: receives each call's number and sample, and then whether "reference" or "kernel" runs.
        only: the number of the only call to make; None makes them all.
        number: the number of the last call; None before the first.
        calls: how many calls the check has made.
        largest: the most elements that one of these calls had.
    """

    say: Callable[[object], object] = lambda what: None
    only: int | None = None
    number: int | None = None
    calls: int = 0
    largest: int = 0

    def record(self, number: int, sample: Sample) -> None:
        """Count a call, and report it before it is made: it may end the process."""
        self.number = number
        self.calls += 1
        self.largest = max(self.largest, sample.numel)
        self.say((number, str(sample)))


watch = ContextVar("watch", default=CallWatch())  # noqa: B039 - each check sets another


def trials(calls: Iterable[Sample]) -> Iterator[Sample]:
    """Yield a check's calls in an order that is always the same.

    A check has one loop over its calls and calls the op nowhere else, so that a call
    has a number by which `opjit test --sample` repeats it.
    """
    watched = watch.get()
    count = 0
    for number, sample in enumerate(calls):
        count += 1
        if watched.only in (None, number):
            watched.record(number, sample)
            yield sample

    if watched.only is not None and watched.only >= count:
        raise AssertionError(
            f"there is no sample {watched.only}: this check calls the op {count} times, "
            "counted from 0"
        )


def declared_samples(op: Op, device: str) -> list[Sample]:
    """Return an op's samples.

    Raises DeclarationError if it lacks a reference or samples, or if the samples are none: a run without a call must not be green.
    """
    _ = op.reference_function
    samples = list(op.samples_on(device))
    if not samples:
        raise DeclarationError(
            f"nothing was tested: {op.qualified} has no sample for {device}; "
            f"yield at least one in the function under @{op.schema.name}.samples"
        )
    return samples


def distinct_samples(
    op: Op,
    device: str,
    at_most: int,
    keep: Callable[[Sample], bool] = lambda sample: True,
    what: str = "of few elements",
) -> list[Sample]:
    """Choose small declared samples that exercise the op most.

    Each next one has the most ranks, dtypes and layouts that the chosen ones lack, then
    the most elements, so that further samples never replace a large one by an empty one.
    Raises Skipped if `keep` accepts no sample; `what` describes the accepted ones.
    """
    left = [sample for sample in op.samples_on(device) if sample.numel <= SMALL and keep(sample)]
    if not left:
        raise Skipped(f"the op declares no sample {what}")

    chosen = list[Sample]()
    covered = set[Hashable]()

    def use(sample: Sample) -> tuple[int, int]:
        return len(_exercised(sample) - covered), sample.numel

    while left and len(chosen) < at_most:
        best = max(left, key=use)
        chosen.append(best)
        covered |= _exercised(best)
        left = [sample for sample in left if sample.kind != best.kind]
    return chosen


def repeated_samples(op: Op, device: str) -> list[Sample]:
    """Choose few samples for repeated calls, and a call that the op rejects."""
    calls = distinct_samples(op, device, 4)
    rejected = calls[0].map(
        lambda t: torch.zeros_like(t, dtype=torch.float8_e4m3fn), "a dtype without arithmetic"
    )
    return [*calls, rejected]


def _exercised(sample: Sample) -> set[Hashable]:
    """Return the properties of a sample that a kernel may handle by separate code."""
    found: set[Hashable] = {str(sample.kwargs)}
    for t in sample.tensors():
        contiguous = f"contiguous {t.is_contiguous()}"
        found |= {t.dtype, t.dim(), contiguous} if t.numel() else {"empty"}
    return found


def large_samples(op: Op, device: str) -> list[Sample]:
    """Return one call of at least LARGE elements for each kind of sample that can be enlarged.

    The kinds that exercise the op most come first. Raises Skipped if this call does not exist.
    """
    found = []
    for sample in distinct_samples(op, device, _KINDS):
        sizes = [sum(size > 1 for size in tensor.shape) for tensor in sample.tensors()]
        side = math.ceil(LARGE ** (1 / max(1, *sizes)))
        enlarged = resized(sample, [side], floating_only=False)
        found += [enlarged] if enlarged else []
    if not found:
        raise Skipped(
            "no sample can be made large: each one is empty, or its sizes are all 1; add a "
            "sample with a size of at least 2"
        )
    return found


def effects(call: Function, op: Op, sample: Sample) -> list[Any]:
    """A call's results and, if the op writes arguments, the written arguments. The sample stays unchanged."""
    return effects_in_place(call, op, sample.map(replica))


def effects_in_place(call: Function, op: Op, sample: Sample) -> list[Any]:
    """The same for a call with the original tensors of the sample, which an op may write.

    Raises ReferenceFailed if the call is the reference's and raises an error.
    """
    say = watch.get().say
    is_reference = call is op.declaration.reference
    say("reference" if is_reference else "kernel")  # the time of both counts against the limit
    try:
        results = as_list(called(call, sample))
    except Exception as error:
        if not is_reference:
            raise
        raise ReferenceFailed(
            f"the reference raises {type(error).__name__} on ({sample}): {error}"
        ) from error
    say("kernel")
    return [*results, *(sample.tensors() if op.schema.mutates else [])]


def results_of(op: Op, sample: Sample) -> list[Any]:
    return effects(op.overload, op, sample)


def expected_of(op: Op, sample: Sample) -> list[Any]:
    return effects(op.reference_function, op, sample)


def called(call: Function, sample: Sample) -> Any:
    """Call a function with the original tensors of a sample."""
    return call(*sample.args, **sample.kwargs)


def rolled(tensor: Tensor, by: int) -> Tensor:
    """The elements in another order.

    They move as bytes, because torch.roll does not support wide unsigned numbers on CUDA and
    float8.
    """
    elements = tensor.resolve_conj().resolve_neg().contiguous().flatten()
    return (
        elements.view(torch.uint8)
        .roll(by * tensor.element_size())
        .view(tensor.dtype)
        .reshape(tensor.shape)
    )


def floating(sample: Sample) -> bool:
    return any(t.dtype.is_floating_point for t in sample.tensors())


def laid(sample: Sample, layout: str) -> Sample:
    """The same elements with other strides; ``expanded`` repeats the first along the first dimension."""

    def change(t: Tensor) -> Tensor:
        turned = tuple(reversed(range(t.dim())))
        if layout == "transposed":
            return t.permute(turned).contiguous().permute(turned)
        if layout == "gaps" and t.dim():
            return torch.stack((t, torch.zeros_like(t)), -1).flatten(-2)[..., ::2]
        if layout == "offset":
            return torch.cat((t.new_zeros(1), t.flatten()))[1:].reshape(t.shape)
        return t[:1].expand_as(t) if layout == "expanded" and t.dim() else t

    return sample.map(change)


def layouts(op: Op) -> Sequence[str]:
    """An op cannot write an expanded tensor, the last layout, because its elements share memory."""
    return LAYOUTS[:-1] if op.schema.mutates else LAYOUTS


def resized(sample: Sample, sizes: Sequence[int], floating_only: bool = True) -> Sample | None:
    """Replace each size above 1 everywhere it occurs, so that tensors of equal sizes keep equal sizes.

    The sample's elements are repeated as needed. Returns None if the sample is empty, if no size is
    above 1, or, with `floating_only`, has a tensor of integers, which may be indices that a smaller
    size makes invalid.
    """
    tensors = sample.tensors()
    known = sorted({size for t in tensors for size in t.shape if size > 1}, reverse=True)
    if not known or not all(t.numel() for t in tensors):
        return None
    if floating_only and not all(t.dtype.is_floating_point for t in tensors):
        return None
    drawn = dict(zip(known, itertools.cycle(sizes), strict=False))

    def change(t: Tensor) -> Tensor:
        shape = torch.Size(drawn.get(size, size) for size in t.shape)
        times = math.ceil(shape.numel() / t.numel())
        return t.flatten().repeat(times)[: shape.numel()].reshape(shape)

    return sample.map(change)


def unequal(sample: Sample) -> Iterator[Sample]:
    """Make some of several equal sizes one larger, because equal sizes hide that a kernel confuses two dimensions.

    The reference decides which of these calls are valid. Only the sizes of floating-point tensors change.
    """
    tensors = sample.tensors()
    for size in sorted({size for t in tensors for size in t.shape if size > 1}):
        places = [
            (index, dim)
            for index, t in enumerate(tensors)
            for dim in range(t.dim())
            if t.dtype.is_floating_point and t.shape[dim] == size
        ]
        ways = itertools.product((0, 1), repeat=len(places))
        for way in itertools.islice(ways, 1, _WAYS):
            longer = sample
            for index, dim in itertools.compress(places, way):
                t = longer.tensors()[index]
                longer = longer.replace(index, torch.cat((t, t.narrow(dim, 0, 1)), dim))
            yield longer


def emptied(sample: Sample) -> Iterator[Sample]:
    """The call without elements: each size replaced by 0 everywhere it occurs, then all of them; and without dimensions."""

    def without(gone: set[int]) -> Callable[[Tensor], Tensor]:
        return lambda t: t.new_empty([0 if size in gone else size for size in t.shape])

    known = {size for t in sample.tensors() for size in t.shape}
    for size in sorted(known, reverse=True):
        yield sample.map(without({size}))
    if len(known) > 1:
        yield sample.map(without(known))
    if known:
        yield sample.map(lambda t: t.flatten()[0] if t.numel() else t)


def with_numbers(sample: Sample, others: Callable[[object], Iterable[object]]) -> Iterator[Sample]:
    """Replace each argument that is no tensor by each of the values that `others` returns for it."""
    values, spec = tree_flatten(sample.values)
    for index, value in enumerate(values):
        for other in others(value):
            args, kwargs = tree_unflatten([*values[:index], other, *values[index + 1 :]], spec)
            note = f"with {other} in place of {value}"
            yield sample._replace(args=args, kwargs=kwargs, note=note)


def with_elements(sample: Sample, values: Callable[[Tensor], Iterable[float]]) -> Iterator[Sample]:
    """Write each of the values that `values` returns for a tensor into its first element."""
    for index, tensor in enumerate(sample.tensors()):
        for value in values(tensor):
            changed = replica(tensor)
            changed[(0,) * tensor.dim()] = value
            yield sample.replace(index, changed, f"with {value} in tensor {index}")


def with_indices(sample: Sample) -> Iterator[Sample]:
    """Write -1, and each size, which is one too large for an index of it, into each tensor of integers."""
    sizes = {size for t in sample.tensors() for size in (*t.shape, t.numel())}

    def indices(tensor: Tensor) -> Iterable[int]:
        is_index = tensor.dtype in (torch.int32, torch.int64) and tensor.numel()
        return sorted({-1, *sizes}) if is_index else ()

    return with_elements(sample, indices)


def with_invalid_arguments(sample: Sample) -> Iterator[Sample]:
    """Replace each number by an extreme one, and each tensor by its first element, without dimensions."""
    yield from with_numbers(sample, lambda value: _EXTREME.get(type(value), ()))
    for index, tensor in enumerate(sample.tensors()):
        if tensor.dim() and tensor.numel():
            first = tensor.flatten()[0]
            yield sample.replace(index, first, f"with tensor {index} without dimensions")

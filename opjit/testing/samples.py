"""The calls that check an op: its samples, and variants of them with other layouts and sizes. `trials` yields them one by one."""

import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample
from opjit.testing.compare import as_list

LAYOUTS = ("transposed", "gaps", "offset", "expanded")
SMALL = 10_000  # elements


class Skipped(unittest.SkipTest):
    """A check does not apply to an op; the text says why. pytest reports it as a skip."""


class CallWatch:
    """Hears of a check's calls, and whether "reference" or "kernel" runs. `only` is the one call to make, `number` that of the last."""

    def __init__(
        self, say: Callable[[object], object] = lambda what: None, only: int | None = None
    ) -> None:
        self.say, self.only = say, only
        self.number: int | None = None


watch = ContextVar("watch", default=CallWatch())  # noqa: B039 - nobody reads the default's number


def trials(calls: Iterable[Sample]) -> Iterator[Sample]:
    """Yield a check's calls in an order that is always the same. A check has one loop over them, and calls the op nowhere else."""
    watched, number = watch.get(), -1
    for number, sample in enumerate(calls):
        if watched.only in (None, number):
            watched.number = number
            watched.say((number, str(sample)))
            yield sample
    if watched.only is not None and watched.only > number:
        raise AssertionError(
            f"there is no sample {watched.only}: this check calls the op {number + 1} times, counted from 0"
        )


def distinct_samples(
    op: Op,
    device: str,
    at_most: int,
    keep: Callable[[Sample], bool] = lambda sample: True,
    what: str = "of few elements",
) -> list[Sample]:
    """Small samples of different kinds, spread over the declared ones. Raises Skipped if `keep` accepts none: those are `what`."""
    found: dict[tuple[Any, ...], Sample] = {}
    for sample in op.samples_on(device):
        if sample.numel <= SMALL and keep(sample):
            found.setdefault(sample.kind, sample)
    one_of_each = list(found.values())
    if not one_of_each:
        raise Skipped(f"the op declares no sample {what}")
    step = max(1.0, len(one_of_each) / at_most)
    return [one_of_each[int(index * step)] for index in range(min(at_most, len(one_of_each)))]


def effects(call: Callable[..., Any], op: Op, sample: Sample) -> list[Any]:
    """A call's results and, if the op writes arguments, the written arguments. The sample stays unchanged."""
    return effects_in_place(call, op, sample.map(replica))


def effects_in_place(call: Callable[..., Any], op: Op, sample: Sample) -> list[Any]:
    """The same of a call with the sample's own tensors, which an op may write."""
    say = watch.get().say
    say("reference" if call is op._reference else "kernel")  # the time limit is for either
    results = as_list(call(*sample.args, **sample.kwargs))
    say("kernel")
    return [*results, *(sample.tensors() if op.schema.mutates else [])]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, including the gaps between its elements."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def moved(tensor: torch.Tensor, memory: torch.Tensor, offset: int | None = None) -> torch.Tensor:
    """The tensor's sizes and strides over other bytes, from an element on; None is the tensor's own offset."""
    start = tensor.storage_offset() if offset is None else offset
    return torch.empty(0, dtype=tensor.dtype, device=memory.device).set_(
        memory.untyped_storage(), start, tensor.shape, tensor.stride()
    )


def replica(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and gaps."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return tensor.clone()
    return moved(tensor, storage_bytes(tensor).clone())


def rolled(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The elements in another order. They move as bytes: torch.roll takes no wide unsigned numbers on CUDA, and no float8."""
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

    def change(t: torch.Tensor) -> torch.Tensor:
        turned = tuple(reversed(range(t.dim())))
        if layout == "transposed":
            return t.permute(turned).contiguous().permute(turned)
        if layout == "gaps" and t.dim():
            return torch.stack((t, torch.zeros_like(t)), -1).flatten(-2)[..., ::2]
        if layout == "offset":
            return torch.cat((t.new_zeros(1), t.flatten()))[1:].reshape(t.shape)
        return t[:1].expand_as(t) if layout == "expanded" and t.dim() else t

    return sample.map(change)


def layouts(op: Op) -> list[str]:
    """An op cannot write a tensor whose elements share memory."""
    return [layout for layout in LAYOUTS if layout != "expanded" or not op.schema.mutates]


def resized(sample: Sample, sizes: Sequence[int]) -> Sample | None:
    """The call with each size above 1 replaced everywhere it occurs, so that tensors of equal sizes keep equal sizes.
    The sample's elements are repeated as needed. None if the sample has no such size, or not only floating-point tensors."""
    known = sorted({size for t in sample.tensors() for size in t.shape if size > 1}, reverse=True)
    if not known or not all(t.numel() and t.dtype.is_floating_point for t in sample.tensors()):
        return None
    drawn = dict(
        zip(known, (sizes[index % len(sizes)] for index in range(len(known))), strict=True)
    )

    def change(t: torch.Tensor) -> torch.Tensor:
        shape = torch.Size(drawn.get(size, size) for size in t.shape)
        return t.flatten()[torch.arange(shape.numel(), device=t.device) % t.numel()].reshape(shape)

    return sample.map(change)


def emptied(sample: Sample) -> Iterator[Sample]:
    """The call without elements: each size replaced by 0 everywhere it occurs, then all of them; and without dimensions."""

    def without(gone: set[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: t.new_empty([0 if size in gone else size for size in t.shape])

    known = {size for t in sample.tensors() for size in t.shape}
    for size in sorted(known, reverse=True):
        yield sample.map(without({size}))
    if len(known) > 1:
        yield sample.map(without(known))
    if known:
        yield sample.map(lambda t: t.flatten()[0] if t.numel() else t)

"""The calls that check an op: its samples, variants of them with other layouts and sizes, and comparisons of results."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.testing.compare import Tolerance, as_list, assert_same
from opjit.testing.trials import reference_runs

LAYOUTS = ("transposed", "gaps", "offset", "expanded")
SMALL = 10_000  # elements


class Skipped(unittest.SkipTest):
    """A check does not apply to an op; the text says why. pytest reports it as a skip."""


def samples(op: Op, device: str) -> list[Sample]:
    """The op's own samples."""
    return list(op.samples_on(device))


def distinct_samples(op: Op, device: str, at_most: int, keep: Callable[[Sample], bool] = lambda sample: True,
                     what: str = "of few elements") -> list[Sample]:
    """Small samples of different kinds, spread over the declared ones.

    Args:
        what: the samples that `keep` accepts, for the message.

    Raises:
        Skipped: the op declares none that `keep` accepts.
    """
    found: dict[tuple[Any, ...], Sample] = {}
    for sample in samples(op, device):
        if sample.numel <= SMALL and keep(sample):
            found.setdefault(sample.kind, sample)
    one_of_each = list(found.values())
    if not one_of_each:
        raise Skipped(f"the op declares no sample {what}")
    step = max(1.0, len(one_of_each) / at_most)
    return [one_of_each[int(index * step)] for index in range(min(at_most, len(one_of_each)))]


def effects(call: Callable[..., Any], op: Op, sample: Sample) -> list[Any]:
    """A call's results and, if the op writes arguments, the written arguments. The sample stays unchanged."""
    own = sample.map(replica)
    with reference_runs() if call is op._reference else nullcontext():
        results = as_list(call(*own.args, **own.kwargs))
    return [*results, *(own.tensors() if op.schema.mutates else [])]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, including the gaps between its elements."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def replica(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and gaps."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return tensor.clone()
    storage = storage_bytes(tensor).clone().untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def floating(sample: Sample) -> bool:
    return any(t.dtype.is_floating_point for t in sample.tensors())


def needs_backward(op: Op) -> None:
    """Skip a check of gradients for an op without one."""
    if not op.differentiable:
        raise Skipped("the op has no backward")


def gradients(sample: Sample, *calls: Callable[..., Any]) -> list[list[torch.Tensor | None]]:
    """The gradients of the floating-point inputs from each call, with different weights for all results.

    Results that some call cannot differentiate have no weight: an op may mark one as not differentiable. Empty if no result has a weight.
    """
    with torch.no_grad():
        if not any(map(_is_continuous, tensors_of(calls[0](*sample.args, **sample.kwargs)))):
            return []  # some of torch's ops raise an error here
    inputs = [with_gradients(sample) for _ in calls]
    results = [tensors_of(call(*own.args, **own.kwargs)) for call, own in zip(calls, inputs, strict=True)]
    counted = [index for index, found in enumerate(zip(*results, strict=True)) if all(r.requires_grad for r in found)]
    if not counted:
        return []
    seeds = gradient_seeds([results[0][index] for index in counted])
    return [list(torch.autograd.grad([found[index] for index in counted], [t for t in own.tensors() if t.requires_grad], seeds,
                                     allow_unused=True)) for found, own in zip(results, inputs, strict=True)]


def gradient_seeds(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Weights for the elements of results, all different; for complex ones with an imaginary part."""
    def seed(r: torch.Tensor) -> torch.Tensor:
        steps = torch.linspace(-1, 2, r.numel(), device=r.device, dtype=torch.float64)
        return (torch.complex(steps.cos(), steps) if r.is_complex() else steps.cos()).to(r.dtype).reshape(r.shape)

    return [seed(r) for r in results]


def _is_continuous(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def assert_same_gradients(sample: Sample, *calls: Callable[..., Any]) -> bool:
    """Compare the gradients of the calls, the reference's first. Returns whether there are any."""
    found = gradients(sample, *calls)
    places = [index for index, t in enumerate(sample.tensors()) if _is_continuous(t)]
    for other in found[1:]:
        for index, mine, theirs in zip(places, other, found[0], strict=True):
            assert theirs is None or mine is not None, (f"on ({sample}) the reference has a gradient for tensor {index} and the op has "
                                                        "none; return it from the backward, or detach the tensor in the reference")
            assert mine is None or theirs is not None, (f"on ({sample}) the op has a gradient for tensor {index} and the reference has "
                                                        "none; return None for it from the backward")
            if mine is not None and theirs is not None:
                assert_same(mine, theirs, sample, f"the gradient of tensor {index}", _rounding(theirs))
    return bool(found)


def _rounding(gradient: torch.Tensor) -> Tolerance | None:
    """The tolerance of a half-precision gradient, whose steps are each rounded: relative to the largest element, not to each."""
    if gradient.dtype not in (torch.float16, torch.bfloat16) or gradient.numel() == 0:
        return None
    eps, largest = torch.finfo(gradient.dtype).eps, gradient.abs().nan_to_num(0, 0, 0).max().item()
    return Tolerance(2 * eps, 8 * eps * largest)


def with_gradients(sample: Sample) -> Sample:
    return sample.map(lambda t: replica(t.detach()).requires_grad_(_is_continuous(t)))


def with_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements with other strides; ``expanded`` repeats the first along the first dimension."""
    if layout == "transposed":
        turned = tuple(reversed(range(tensor.dim())))
        return tensor.permute(turned).contiguous().permute(turned)
    if layout == "gaps" and tensor.dim():
        return torch.stack((tensor, torch.zeros_like(tensor)), -1).flatten(-2)[..., ::2]
    if layout == "offset":
        return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].reshape(tensor.shape)
    if layout == "expanded" and tensor.dim():
        return tensor[:1].expand_as(tensor)
    return tensor


def resized(sample: Sample, sizes: Sequence[int]) -> Sample | None:
    """The call with each size above 1 replaced everywhere it occurs, so that tensors of equal sizes keep equal sizes.

    The sample's elements are repeated as needed. None if the sample has no such size, or not only floating-point tensors.
    """
    known = sorted({size for t in sample.tensors() for size in t.shape if size > 1}, reverse=True)
    if not known or not all(t.numel() and t.dtype.is_floating_point for t in sample.tensors()):
        return None
    drawn = dict(zip(known, (sizes[index % len(sizes)] for index in range(len(known))), strict=True))

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

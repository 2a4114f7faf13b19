"""Checks of an op under torch.func: torch.vmap, and gradients by transformation."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import as_list, assert_same
from opjit.testing.gradients import gradient_seeds, needs_backward, with_gradients
from opjit.testing.samples import Skipped, distinct_samples, floating, rolled
from opjit.testing.trials import trials

CHECKS: list[Check] = []


@add(CHECKS, "vmap")
def _vmap(op: Op, device: str) -> str:
    """torch.vmap gives the results of a call for each element of the batch."""
    if not op.batches:
        raise Skipped("the op has no rule for torch.vmap: declare it with elementwise=True, or add @vmap")
    calls = distinct_samples(op, device, 8, lambda sample: bool(tensors_of(sample.args)) and not tensors_of(sample.kwargs),
                             "without tensors by name")
    for sample in trials(calls):
        count = len(tensors_of(sample.args))
        for dims in {(0,) * count, (-1,) * count, (0, *(None,) * (count - 1)), (*(None,) * (count - 1), 0)}:
            _compare_with_loop(op, sample, dims)
    return tally(len(calls), "sample")


def _compare_with_loop(op: Op, sample: Sample, dims: tuple[int | None, ...]) -> None:
    """Compare a batch of three with three calls; tensors without a dimension in `dims` are the same in each."""
    values, spec = tree_flatten(sample.args)
    waiting = iter(dims)
    places = [next(waiting) if isinstance(value, torch.Tensor) else None for value in values]
    elements = [[value, rolled(value, 1), value] if place is not None else [value] * 3 for value, place in zip(values, places, strict=True)]
    batched = [each[0] if place is None else torch.stack(each, place) for each, place in zip(elements, places, strict=True)]

    def call(*flat: Any) -> Any:
        return op.overload(*tree_unflatten(list(flat), spec), **sample.kwargs)

    got = torch.vmap(call, in_dims=tuple(places))(*batched)
    one_by_one = [as_list(call(*(each[number] for each in elements))) for number in range(3)]
    expected = [torch.stack(results) for results in zip(*one_by_one, strict=True)]
    assert_same(as_list(got), expected, sample, f"torch.vmap with in_dims={dims}")


@add(CHECKS, "torch.func")
def _func(op: Op, device: str) -> str:
    """torch.func.vjp gives the gradients of autograd."""
    needs_backward(op)
    if not op.batches:
        raise Skipped("torch.func takes no backward of an op with a list of tensors")
    compared = 0
    for sample in trials(distinct_samples(op, device, 8, floating, "with floating-point elements")):
        own = with_gradients(sample)
        results = as_list(op.overload(*own.args, **own.kwargs))
        counted = [index for index, result in enumerate(results) if isinstance(result, torch.Tensor) and result.requires_grad]
        if counted:
            seeds = gradient_seeds([results[index] for index in counted])
            inputs = [t for t in own.tensors() if t.requires_grad]
            expected = torch.autograd.grad([results[index] for index in counted], inputs, seeds, materialize_grads=True)
            assert_same(_transformed(op, own, counted, seeds), list(expected), sample, "the gradient by torch.func")
            compared += 1
    if not compared:
        raise Skipped("no result has a gradient")
    return tally(compared, "sample")


def _transformed(op: Op, sample: Sample, counted: list[int], seeds: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the sample's tensors that require them."""
    inputs = [t for t in sample.tensors() if t.requires_grad]

    def call(*changed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        waiting = iter(changed)
        own = sample.map(lambda t: next(waiting) if t.requires_grad else t)
        results = as_list(op.overload(*own.args, **own.kwargs))
        return tuple(results[index] for index in counted)

    differentiate = torch.func.vjp(call, *(t.detach() for t in inputs))[1]
    return list(differentiate(tuple(seeds)))

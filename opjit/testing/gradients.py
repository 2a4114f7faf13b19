"""Checks of gradients beyond the first: a second backward, complex numbers, and what the forward keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import assert_same
from opjit.testing.samples import (
    Skipped,
    assert_same_gradients,
    distinct_samples,
    effects,
    floating,
    gradient_seeds,
    needs_backward,
    with_gradients,
)
from opjit.testing.trials import trials

CHECKS: list[Check] = []


def _float64(op: Op, device: str, at_most: int) -> list[Sample]:
    needs_backward(op)
    return distinct_samples(op, device, at_most, lambda sample: torch.float64 in {t.dtype for t in sample.tensors() if t.numel()},
                            "with float64 elements")


@add(CHECKS, "saved tensors")
def _saved(op: Op, device: str) -> str:
    """The forward keeps tensors with ctx.save_for_backward: one that is an attribute of ctx is never freed, and misses later writes."""
    needs_backward(op)
    given: list[Any] = []
    original = op._setup_context

    def setup_context(**arguments: Any) -> None:
        given.append(arguments["ctx"])
        if original is not None:
            original(**arguments)

    op._setup_context = setup_context
    try:
        for sample in trials(distinct_samples(op, device, 4, floating, "with floating-point elements")):
            own = with_gradients(sample)
            results = op.overload(*own.args, **own.kwargs)
            for ctx in given:
                kept = [name for name, value in getattr(ctx, "__dict__", {}).items() if tensors_of(value)]
                assert not kept, f"on ({sample}) ctx.{kept[0]} is a tensor; keep it with ctx.save_for_backward"
            del results
            given.clear()
    finally:
        op._setup_context = original
    return "none kept on ctx"


@add(CHECKS, "complex gradients")
def _complex(op: Op, device: str) -> str:
    """Gradients of complex tensors equal the reference's, if the op takes complex tensors."""
    calls = [sample.map(lambda t: torch.complex(t, t.flip(0) if t.dim() else -t) if t.dtype == torch.float64 else t, "as complex128")
             for sample in _float64(op, device, 4)]
    compared = 0
    for sample in trials(calls):
        try:
            effects(op.reference_function, op, sample)
            effects(op.overload, op, sample)
        except Exception:  # another check tests the op's error
            continue
        compared += assert_same_gradients(sample, op.reference_function, op.overload)
    if not compared:
        raise Skipped("the op or its reference takes no complex tensors")
    return tally(compared, "complex128 sample")


@add(CHECKS, "second gradients")
def _second(op: Op, device: str) -> str:
    """A second backward gives the reference's gradients, or raises an error."""
    small = [sample for sample in _float64(op, device, 6) if sample.numel <= 500]
    compared = refused = 0
    for sample in trials(small):
        try:
            expected = _second_gradients(op.reference_function, sample)
        except RuntimeError:
            continue
        if expected is None:
            continue
        try:
            found = _second_gradients(op.overload, sample)
        except RuntimeError:
            refused += 1
            continue
        inputs = [f"tensor {index}" for index, t in enumerate(with_gradients(sample).tensors()) if t.requires_grad]
        names = [*inputs, *(f"the weight of result {number}" for number in range(len(expected) - len(inputs)))]
        for name, mine, theirs in zip(names, found or [None] * len(expected), expected, strict=True):
            if mine is not None or theirs is not None:
                known = mine if mine is not None else theirs
                assert known is not None
                zero = torch.zeros_like(known)
                assert_same(zero if mine is None else mine, zero if theirs is None else theirs, sample,
                            f"the second gradient of {name}")
        compared += 1
    if not compared + refused:
        raise Skipped("the reference cannot be differentiated twice")
    return tally(compared, "float64 sample") if compared else "a second backward raises an error"


def _second_gradients(call: Callable[..., Any], sample: Sample) -> list[torch.Tensor | None] | None:
    """Gradients of a function of the call's first gradients; None if there is no first one. None for a tensor is zero."""
    own = with_gradients(sample)
    inputs = [t for t in own.tensors() if t.requires_grad]
    results = [r for r in tensors_of(call(*own.args, **own.kwargs)) if r.requires_grad]
    if not results:
        return None
    seeds = [seed.requires_grad_() for seed in gradient_seeds(results)]
    first = torch.autograd.grad(results, inputs, seeds, create_graph=True, allow_unused=True)
    score = sum(((g * w).sum() for g, w in zip(first, gradient_seeds([t.detach() for t in inputs]), strict=True) if g is not None),
                start=torch.zeros((), dtype=torch.float64, device=inputs[0].device))
    if not score.requires_grad:
        return [None] * (len(inputs) + len(seeds))
    return list(torch.autograd.grad(score, [*inputs, *seeds], allow_unused=True))

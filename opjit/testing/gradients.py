"""Checks of gradients: against the reference's, against the derivative, and of what the forward keeps for the backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import Tolerance, assert_same
from opjit.testing.samples import Skipped, distinct_samples, effects, floating, replica, trials

CHECKS: list[Check] = []
_TIMEOUT_FACTOR = 6


def with_gradients(sample: Sample) -> Sample:
    return sample.map(lambda t: replica(t.detach()).requires_grad_(_is_continuous(t)))


def assert_same_gradients(
    sample: Sample, reference: Callable[..., Any], call: Callable[..., Any]
) -> bool:
    """Compare the gradients of two calls. Returns whether there are any."""
    found = _gradients_of(sample, reference, call)
    places = [index for index, t in enumerate(sample.tensors()) if _is_continuous(t)]
    for index, theirs, mine in zip(places, *found, strict=True) if found else ():
        assert theirs is None or mine is not None, (
            f"on ({sample}) the reference has a gradient for tensor {index} and the op has "
            "none; return it from the backward, or detach the tensor in the reference"
        )
        assert mine is None or theirs is not None, (
            f"on ({sample}) the op has a gradient for tensor {index} and the reference has "
            "none; return None for it from the backward"
        )
        if mine is not None and theirs is not None:
            assert_same(mine, theirs, sample, f"the gradient of tensor {index}", _rounding(theirs))
    return bool(found)


def _gradients_of(sample: Sample, *calls: Callable[..., Any]) -> list[list[torch.Tensor | None]]:
    """The gradients of the floating-point inputs from each call, with different weights for all results. Results that some call cannot
    differentiate have no weight: an op may mark one as not differentiable. Empty if no result has a weight."""
    with torch.no_grad():
        if not any(map(_is_continuous, tensors_of(calls[0](*sample.args, **sample.kwargs)))):
            return []  # some of torch's ops raise an error here
    inputs = [with_gradients(sample) for _ in calls]
    results = [
        tensors_of(call(*own.args, **own.kwargs)) for call, own in zip(calls, inputs, strict=True)
    ]
    counted = [
        index
        for index, found in enumerate(zip(*results, strict=True))
        if all(r.requires_grad for r in found)
    ]
    if not counted:
        return []
    seeds = [_weights(results[0][index]) for index in counted]
    return [
        list(
            torch.autograd.grad(
                [found[index] for index in counted],
                [t for t in own.tensors() if t.requires_grad],
                seeds,
                allow_unused=True,
            )
        )
        for found, own in zip(results, inputs, strict=True)
    ]


def _weights(result: torch.Tensor) -> torch.Tensor:
    """A weight for each element of a result, all different; for complex ones with an imaginary part."""
    steps = torch.linspace(-1, 2, result.numel(), device=result.device, dtype=torch.float64)
    weights = torch.complex(steps.cos(), steps) if result.is_complex() else steps.cos()
    return weights.to(result.dtype).reshape(result.shape)


def _is_continuous(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _rounding(gradient: torch.Tensor) -> Tolerance | None:
    """The tolerance of a half-precision gradient, whose steps are each rounded: relative to the largest element, not to each."""
    if gradient.dtype not in (torch.float16, torch.bfloat16) or gradient.numel() == 0:
        return None
    eps, largest = torch.finfo(gradient.dtype).eps, gradient.abs().nan_to_num(0, 0, 0).max().item()
    return Tolerance(2 * eps, 8 * eps * largest)


def _needs_backward(op: Op) -> None:
    if not op.differentiable:
        raise Skipped("the op has no backward")


@add(CHECKS, "gradients", _TIMEOUT_FACTOR)
def _gradients(op: Op, device: str) -> str:
    """Gradients equal the reference's."""
    _needs_backward(op)
    compared = sum(
        assert_same_gradients(sample, op.reference_function, op.overload)
        for sample in trials(list(op.samples_on(device)))
    )
    if not compared:
        raise Skipped(
            "the reference is a step function without a gradient; test the op's gradient in a test of its own"
        )
    return tally(compared, "sample")


@add(CHECKS, "gradcheck", _TIMEOUT_FACTOR)
def _gradcheck(op: Op, device: str) -> str:
    """torch.autograd.gradcheck passes in float64 wherever it passes for the reference."""
    checked = sum(
        _derived(op, sample, torch.autograd.gradcheck) for sample in trials(_float64(op, device, 8))
    )
    if not checked:
        raise Skipped("the reference's gradient is not its derivative")
    return tally(checked, "float64 sample")


@add(CHECKS, "second gradients", _TIMEOUT_FACTOR)
def _second(op: Op, device: str) -> str:
    """torch.autograd.gradgradcheck passes in float64 wherever it passes for the reference, or a second backward raises an error."""
    checked = refused = 0
    for sample in trials(_float64(op, device, 6)):
        try:
            checked += _derived(op, sample, torch.autograd.gradgradcheck)
        except GradcheckError:
            raise
        except RuntimeError:
            refused += 1
    if not checked + refused:
        raise Skipped("the reference cannot be differentiated twice")
    return tally(checked, "float64 sample") if checked else "a second backward raises an error"


def _float64(op: Op, device: str, at_most: int) -> list[Sample]:
    _needs_backward(op)
    return distinct_samples(
        op,
        device,
        at_most,
        lambda each: each.numel <= 500 and any(t.dtype == torch.float64 for t in each.tensors()),
        "with float64 and at most 500 elements",
    )


def _derived(op: Op, sample: Sample, check: Callable[..., bool]) -> bool:
    """Whether one of torch's two checks passes for the reference; then it must for the op, or raises GradcheckError."""
    inputs = sample.map(lambda t: t.detach().clone().requires_grad_(t.dtype == torch.float64))
    values, spec = tree_flatten(inputs.values)

    def differentiable(call: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
        def results(*changed: Any) -> tuple[torch.Tensor, ...]:
            args, kwargs = tree_unflatten(list(changed), spec)
            return tuple(r for r in tensors_of(call(*args, **kwargs)) if r.requires_grad)

        return results

    reference = differentiable(op.reference_function)
    try:
        applies = bool(reference(*values)) and check(
            reference, values, fast_mode=True, raise_exception=False
        )
    except RuntimeError:  # torch cannot differentiate it so often
        applies = False
    return applies and check(differentiable(op.overload), values, fast_mode=sample.numel > 100)


@add(CHECKS, "complex gradients")
def _complex(op: Op, device: str) -> str:
    """Gradients of complex tensors equal the reference's, if the op takes complex tensors."""
    calls = [
        sample.map(
            lambda t: (
                torch.complex(t, t.flip(0) if t.dim() else -t) if t.dtype == torch.float64 else t
            ),
            "as complex128",
        )
        for sample in _float64(op, device, 4)
    ]
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


@add(CHECKS, "saved tensors")
def _saved(op: Op, device: str) -> str:
    """The forward keeps tensors with ctx.save_for_backward: one that is an attribute of ctx is never freed, and misses later writes."""
    _needs_backward(op)
    for sample in trials(distinct_samples(op, device, 4, floating, "with floating-point elements")):
        own = with_gradients(sample)
        for result in tensors_of(op.overload(*own.args, **own.kwargs)):
            kept = [
                name
                for name, value in getattr(result.grad_fn, "__dict__", {}).items()
                if tensors_of(value)
            ]
            assert not kept, (
                f"on ({sample}) ctx.{kept[0]} is a tensor; keep it with ctx.save_for_backward"
            )
    return "none kept on ctx"

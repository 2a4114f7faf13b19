"""Checks of gradients: compared with the reference, with the numerical derivative, and of saved tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, float32, float64
from torch.autograd.gradcheck import GradcheckError
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.declare.declaration import Function
from opjit.declare.sample import Sample
from opjit.operators.op import Op
from opjit.progress import tally
from opjit.tensors import replica, tensors_of
from opjit.testing.checks import Check, add
from opjit.testing.compare import Tolerance, assert_same, dtype_name
from opjit.testing.samples import (
    Skipped,
    called,
    distinct_samples,
    floating,
    laid,
    results_of,
    trials,
)

CHECKS = list[Check]()
_TIMEOUT_FACTOR = 6
# Steps and tolerances for float32: half of its digits are left to a numerical derivative.
_FLOAT32_DERIVATIVE = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}


def with_gradients(sample: Sample) -> Sample:
    return sample.map(lambda t: replica(t.detach()).requires_grad_(_is_continuous(t)))


def assert_same_gradients(sample: Sample, reference: Function, call: Function) -> bool:
    """Compare the gradients of two calls. Returns whether there are any."""
    places = [index for index, t in enumerate(sample.tensors()) if _is_continuous(t)]
    rounding = dict[int, Tolerance | None]()
    for layout in ("contiguous", "transposed", "expanded"):
        strides, found = _gradients_of(sample, layout, reference, call)
        if not found:
            return False
        for index, theirs, mine in zip(places, *found, strict=True):
            assert theirs is None or mine is not None, (
                f"on ({sample}) the reference has a gradient for tensor {index} but the op does not; "
                "return it from the backward, or detach the tensor in the reference"
            )
            assert mine is None or theirs is not None, (
                f"on ({sample}) the op has a gradient for tensor {index} but the reference does not; "
                "return None for it from the backward"
            )
            if mine is not None and theirs is not None:
                # With equal weights, gradients can cancel and leave only rounding errors.
                within = rounding.setdefault(index, _rounding(theirs))
                what = f"the gradient of tensor {index}{strides}"
                assert_same(mine, theirs, sample, what, within)
    return True


def _gradients_of(
    sample: Sample, layout: str, *calls: Function
) -> tuple[str, list[list[Tensor | None]]]:
    """The gradients of the floating-point inputs from each call, after a note on the strides of
    the results' gradients: weights with a layout, different for all results.

    If some call cannot differentiate a result, the weight of the result is zero, because an op may
    mark it as not differentiable. Empty if no result has a weight.
    """
    with torch.no_grad():
        if not any(map(_is_continuous, tensors_of(called(calls[0], sample)))):
            return "", []  # some of torch's ops raise an error here
    inputs = [with_gradients(sample) for _ in calls]
    results = [tensors_of(called(call, own)) for call, own in zip(calls, inputs, strict=True)]
    pairs = enumerate(zip(*results, strict=True))
    counted = [index for index, found in pairs if all(r.requires_grad for r in found)]
    if not counted:
        return "", []
    weights = tuple(_weights(results[0][index]) for index in counted)
    seeds = laid(Sample(weights), layout).tensors()
    strides = [seed.stride() for seed in seeds if not seed.is_contiguous()]
    note = f", for a result's gradient with strides {strides[0]}," if strides else ""
    gradients = list[list[Tensor | None]]()
    for found, own in zip(results, inputs, strict=True):
        outputs = [found[index] for index in counted]
        leaves = [t for t in own.tensors() if t.requires_grad]
        gradients.append(list(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)))
    return note, gradients


def _weights(result: Tensor) -> Tensor:
    """A weight for each element of a result, all different; for complex ones with an imaginary part."""
    steps = torch.linspace(-1, 2, result.numel(), device=result.device, dtype=float64)
    weights = torch.complex(steps.cos(), steps) if result.is_complex() else steps.cos()
    return weights.to(result.dtype).reshape(result.shape)


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _rounding(gradient: Tensor) -> Tolerance | None:
    """Return the tolerance of a half-precision gradient.

    It is relative to the largest element and not to each, because every step is rounded.
    """
    if gradient.dtype not in (torch.float16, torch.bfloat16) or gradient.numel() == 0:
        return None
    eps = torch.finfo(gradient.dtype).eps
    largest = gradient.abs().nan_to_num(0, 0, 0).max().item()
    return Tolerance(2 * eps, 8 * eps * largest)


def _needs_backward(op: Op) -> None:
    if not op.declaration.differentiable:
        raise Skipped("the op has no backward")


@add(CHECKS, "gradients", _TIMEOUT_FACTOR)
def _gradients(op: Op, device: str) -> str:
    """Gradients equal the reference's."""
    _needs_backward(op)
    call, reference = op.overload, op.reference_function
    samples = trials(op.samples_on(device))
    compared = sum(assert_same_gradients(sample, reference, call) for sample in samples)
    if not compared:
        raise Skipped(
            "the reference is a step function without a gradient; test the op's gradient in a "
            "separate test"
        )
    return tally(compared, "sample")


@add(CHECKS, "gradcheck", _TIMEOUT_FACTOR)
def _gradcheck(op: Op, device: str) -> str:
    """torch.autograd.gradcheck passes wherever it passes for the reference: in float64, or in
    float32 if the samples do not include float64.
    """
    samples, dtype = _derivable(op, device, 8)
    check = torch.autograd.gradcheck
    checked = sum(_derived(op, sample, check, dtype) for sample in trials(samples))
    if not checked:
        raise Skipped("the reference's gradient is not its derivative")
    return tally(checked, f"{dtype_name(dtype)} sample")


@add(CHECKS, "second gradients", _TIMEOUT_FACTOR)
def _second(op: Op, device: str) -> str:
    """torch.autograd.gradgradcheck passes wherever it passes for the reference, or a second backward raises an error."""
    samples, dtype = _derivable(op, device, 6)
    checked = 0
    refused = 0
    for sample in trials(samples):
        try:
            checked += _derived(op, sample, torch.autograd.gradgradcheck, dtype)
        except GradcheckError:
            raise
        except RuntimeError:
            refused += 1
    if not checked and not refused:
        raise Skipped("the reference cannot be differentiated twice")
    if not checked:
        return "a second backward raises an error"
    return tally(checked, f"{dtype_name(dtype)} sample")


def _derivable(op: Op, device: str, at_most: int) -> tuple[list[Sample], torch.dtype]:
    """Return small samples for numerical derivatives and their dtype: float64 or, without a
    sample in float64, float32.
    """
    _needs_backward(op)
    try:
        return _of_dtype(op, device, at_most, float64), float64
    except Skipped:
        return _of_dtype(op, device, at_most, float32), float32


def _of_dtype(op: Op, device: str, at_most: int, dtype: torch.dtype) -> list[Sample]:
    what = f"with {dtype_name(dtype)} and at most 500 elements"
    return distinct_samples(
        op,
        device,
        at_most,
        lambda s: s.numel <= 500 and any(t.dtype == dtype for t in s.tensors()),
        what,
    )


def _derived(op: Op, sample: Sample, check: Callable[..., bool], dtype: torch.dtype) -> bool:
    """Return whether one of torch's two checks passes for the reference.

    Then it must pass for the op, or it raises GradcheckError.
    """
    inputs = sample.map(lambda t: t.detach().clone().requires_grad_(t.dtype == dtype))
    values, spec = tree_flatten(inputs.values)
    within = {} if dtype == float64 else _FLOAT32_DERIVATIVE

    def differentiable(call: Function) -> Callable[..., tuple[Tensor, ...]]:
        def results(*changed: Any) -> tuple[Tensor, ...]:
            args, kwargs = tree_unflatten(list(changed), spec)
            return tuple(r for r in tensors_of(call(*args, **kwargs)) if r.requires_grad)

        return results

    reference = differentiable(op.reference_function)
    try:
        applies = bool(reference(*values)) and check(
            reference, values, fast_mode=True, raise_exception=False, **within
        )
    except RuntimeError:  # torch cannot differentiate it so often
        applies = False
    fast_mode = sample.numel > 100
    return applies and check(differentiable(op.overload), values, fast_mode=fast_mode, **within)


@add(CHECKS, "complex gradients")
def _complex(op: Op, device: str) -> str:
    """Gradients of complex tensors equal the reference's, if the op accepts complex tensors."""
    _needs_backward(op)
    samples = _of_dtype(op, device, 4, float64)
    compared = 0
    for sample in trials(each.map(_as_complex, "as complex128") for each in samples):
        try:
            results_of(op, sample)
            _gradients_of(sample, "contiguous", op.reference_function)
        except (
            Exception
        ):  # a separate check covers the op's error, and an error of the reference is not the op's
            continue
        compared += assert_same_gradients(sample, op.reference_function, op.overload)
    if not compared:
        raise Skipped("the op or its reference does not support complex tensors or their gradients")
    return tally(compared, "complex128 sample")


def _as_complex(tensor: Tensor) -> Tensor:
    if tensor.dtype != float64:
        return tensor
    return torch.complex(tensor, tensor.flip(0) if tensor.dim() else -tensor)


@add(CHECKS, "saved tensors")
def _saved(op: Op, device: str) -> str:
    """The forward keeps tensors with ctx.save_for_backward: a tensor that is an attribute of ctx
    is never freed, and later writes to it are not noticed.
    """
    _needs_backward(op)
    for sample in trials(distinct_samples(op, device, 4, floating, "with floating-point elements")):
        own = with_gradients(sample)
        for result in tensors_of(called(op.overload, own)):
            attributes = getattr(result.grad_fn, "__dict__", {})
            for name, value in attributes.items():
                assert not tensors_of(value), (
                    f"on ({sample}) ctx.{name} is a tensor; keep it with ctx.save_for_backward"
                )
    return "none kept on ctx"

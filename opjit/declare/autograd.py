"""Autograd rules of an op: its backward, an error because it has none, or results that are constants.

Each function registers one of the three in a library, which takes it back when it is destroyed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.declare import transforms
from opjit.declare.transforms import TransformRules
from opjit.recipe.schema import Schema

Function = Callable[..., Any]


class AutogradRule(torch.library.Library):
    """Holds an op's rule. With `overload`, the rule is an error in forward mode, where tangents would be zero."""

    overload: OpOverload | None = None

    def impl(self, op_name: Any, fn: Function, dispatch_key: str = "", **settings: Any) -> None:
        overload = self.overload

        def checked(*args: Any, **kwargs: Any) -> Any:
            if forward_ad._current_level >= 0 and overload is not None:
                _refuse_tangents(overload, _tensors(args, kwargs))
            return fn(*args, **kwargs)

        kernel = checked if dispatch_key == "Autograd" and overload is not None else fn
        super().impl(op_name, kernel, dispatch_key, **settings)  # type: ignore[no-untyped-call]


def bind(library: AutogradRule, schema: Schema, overload: OpOverload, rules: TransformRules) -> None:
    """Make the declared backward the op's."""
    library.overload = overload
    torch.library.register_autograd(schema.qualified, _trimmed(rules.backward), setup_context=rules.setup_context, lib=library)
    _bind_transforms(library, schema, overload, rules)


def constant(library: AutogradRule, schema: Schema, overload: OpOverload, rules: TransformRules) -> None:
    """Make autograd treat the op's results as constants."""
    library.impl(schema.name, torch.library.fallthrough_kernel, "Autograd")


def refuse(library: AutogradRule, schema: Schema, overload: OpOverload, rules: TransformRules) -> None:
    """Make every derivative of the op an error; without any kernel, torch only warns, and treats the results as constants."""
    if schema.returned:
        library.impl(schema.name, _refusing_gradients(schema, overload), "Autograd", with_keyset=True)
        return
    if schema.mutates and not any(result.kind == "Tensor" for result in schema.results):
        return  # no result could have a derivative

    def refused(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        tensors = _tensors(args, kwargs)
        _refuse_tangents(overload, tensors)

        def call() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return call()
        structure: list[Any] = []
        apply: Callable[..., Any] = _Refused.apply  # untyped in some versions of torch
        results = apply(schema.qualified, call, structure, *tensors)
        return tree_unflatten(list(results), structure[0])

    library.impl(schema.name, refused, "Autograd", with_keyset=True)
    if not schema.mutates:
        refusing = rules._replace(backward=functools.partial(_no_derivative, schema.qualified), setup_context=_keep_nothing)
        _bind_transforms(library, schema, overload, refusing)


def _refusing_gradients(schema: Schema, overload: OpOverload) -> Function:
    """The kernel of an op that returns what it writes, which torch has no derivative for: it takes no tensor that requires a gradient."""

    def refuse(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args, kwargs)):
            raise RuntimeError(f"{schema.qualified} writes an argument and returns it, which has no derivative, but one of its tensors "
                               "requires a gradient; call it under torch.no_grad(), or with .detach()")
        _refuse_tangents(overload, _tensors(args, kwargs))
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    return refuse


class _Refused(torch.autograd.Function):
    """A call whose results have no derivative."""

    @staticmethod
    def forward(ctx: Any, qualified: str, call: Function, structure: list[Any], *tensors: torch.Tensor) -> Any:
        ctx.qualified = qualified
        results, spec = tree_flatten(call())
        structure.append(spec)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        _no_derivative(ctx.qualified)


def _no_derivative(qualified: str, *context: Any) -> None:
    raise RuntimeError(f"derivative for {qualified} is not implemented")


def _keep_nothing(**context: Any) -> None:
    """Set up no context, for an op without a backward."""


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call, also those in lists."""
    values = (item for value in (*args, *kwargs.values()) for item in (value if isinstance(value, (list, tuple)) else (value,)))
    return [value for value in values if isinstance(value, torch.Tensor)]


def _refuse_tangents(overload: OpOverload, tensors: Sequence[torch.Tensor]) -> None:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise transforms.no_forward_mode(overload)


def _bind_transforms(library: torch.library.Library, schema: Schema, overload: OpOverload, rules: TransformRules) -> None:
    """Register what torch.func does with the op; an op with a list of Tensors is left to torch."""
    if not any(argument.list and argument.kind == "Tensor" for argument in schema.arguments) and not any(
            result.list for result in schema.results):
        transforms.bind(library, schema, overload, rules)


def _trimmed(backward: Function) -> Function:
    """Drop a backward's Nones for trailing arguments that equal their defaults: torch drops those arguments, and takes no gradient."""

    def differentiate(ctx: Any, *grads: Any) -> Any:
        result, passed = backward(ctx, *grads), len(ctx.needs_input_grad)
        return result[:passed] if isinstance(result, tuple) and not any(one is not None for one in result[passed:]) else result

    return differentiate

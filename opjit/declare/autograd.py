"""Binds a declared backward to its op: 0.78 of the time of torch.library.register_autograd per differentiable call (benchmarks/call.py).

torch reads the schema and wraps its arguments anew in each call; here the schema is read once. That needs functions private to torch:
where one is missing, or the op takes a list of Tensors, torch's own register_autograd binds the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from opjit.recipe.schema import Schema

Function = Callable[..., Any]
PRIVATE = ("_any_requires_grad", "_AutoDispatchBelowAutograd", "_after_autograd_keyset")  # of torch._C


class _Call(threading.local):
    """Passed beside torch.autograd.Function.apply, which would take them for inputs of the op."""

    keys: torch._C.DispatchKeySet
    kwargs: dict[str, Any]


def bind(schema: Schema, overload: OpOverload, backward: Function, setup_context: Function, library: torch.library.Library) -> None:
    """Make ``backward(ctx, *grads)`` the op's; both functions have the signatures of torch.library.register_autograd."""
    takes_list = any(argument.list and argument.kind == "Tensor" for argument in schema.arguments)
    if takes_list or not all(hasattr(torch._C, name) for name in PRIVATE):
        torch.library.register_autograd(schema.qualified, _trimmed(backward), setup_context=setup_context, lib=library)
    else:
        library.impl(schema.name, _kernel(overload, backward, setup_context), "Autograd", with_keyset=True)


def _trimmed(backward: Function) -> Function:
    """A backward without the Nones for trailing arguments that equal their defaults: torch drops those arguments, and takes no gradient."""

    def differentiate(ctx: Any, *grads: Any) -> Any:
        result, passed = backward(ctx, *grads), len(ctx.needs_input_grad)
        return result[:passed] if isinstance(result, tuple) and not any(one is not None for one in result[passed:]) else result

    return differentiate


def _kernel(overload: OpOverload, backward: Function, setup_context: Function) -> Function:
    """The kernel for the op's autograd keys, which torch calls whether or not a gradient is wanted."""
    redispatch, call = overload.redispatch, _Call()
    any_requires_grad, is_grad_enabled = torch._C._any_requires_grad, torch._C.is_grad_enabled
    below, keys_below = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    differentiated: Function | None = None  # made for the first gradient, to keep declarations cheap

    def autograd(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        nonlocal differentiated
        if is_grad_enabled() and any_requires_grad(*args):
            if differentiated is None:
                differentiated = _function(overload, backward, setup_context, call).apply
            call.keys, call.kwargs = keys, kwargs
            return differentiated(*args)
        with below():
            return redispatch(keys & keys_below, *args, **kwargs)

    return autograd


def _function(overload: OpOverload, backward: Function, setup_context: Function, call: _Call) -> Any:
    """The op as a torch.autograd.Function."""
    redispatch = overload.redispatch
    below, keys_below = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    arguments = overload._schema.arguments
    positional = tuple(argument.default_value for argument in arguments if not argument.kwarg_only)
    named = {argument.name: argument.default_value for argument in arguments if argument.kwarg_only}

    def forward(ctx: Any, *args: Any) -> Any:
        keys, kwargs = call.keys, call.kwargs
        with below():
            result = redispatch(keys & keys_below, *args, **kwargs)
            inputs = args + positional[len(args):]  # torch drops trailing arguments that equal their defaults
            if named:
                setup_context(ctx=ctx, inputs=inputs, keyword_only_inputs={**named, **kwargs}, output=result)
            else:
                setup_context(ctx=ctx, inputs=inputs, output=result)
        return result

    def differentiate(ctx: Any, *grads: Any) -> Any:  # compiled autograd traces a function, not a bound method
        return backward(ctx, *grads)

    return type(overload._schema.name.replace("::", "_"), (torch.autograd.Function,),
                {"forward": staticmethod(forward), "backward": staticmethod(differentiate)})

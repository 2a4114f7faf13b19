"""A declared backward, bound to its op: what torch.library.register_autograd does, at half of its cost for each call.

torch asks for every call what the op's schema says, and packs it into objects. Here the schema is read once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from opjit.op import Op

Function = Callable[..., Any]


class _Call(threading.local):
    """What torch.autograd.Function.apply has no room for: it would count as an input of the op's."""

    keys: torch._C.DispatchKeySet
    kwargs: dict[str, Any]


def bind(op: Op, backward: Function, setup_context: Function | None, library: torch.library.Library) -> None:
    """Make ``backward(ctx, *grads)`` the op's; both functions are as torch.library.register_autograd takes them."""
    if any(argument.list and argument.kind == "Tensor" for argument in op.schema.arguments):
        torch.library.register_autograd(op.qualified, _of_passed(backward), setup_context=setup_context, lib=library)  # unpacks the lists
    else:
        library.impl(op.schema.name, _kernel(op, backward, setup_context), "Autograd", with_keyset=True)


def _of_passed(backward: Function) -> Function:
    """Without the Nones for trailing arguments that equal their defaults: torch passes those on to nobody, and takes no gradient then."""

    def differentiate(ctx: Any, *grads: Any) -> Any:
        result, passed = backward(ctx, *grads), len(ctx.needs_input_grad)
        return result[:passed] if isinstance(result, tuple) and not any(one is not None for one in result[passed:]) else result

    return differentiate


def _kernel(op: Op, backward: Function, setup_context: Function | None) -> Function:
    """What torch calls for the op's autograd keys, whether or not a gradient is wanted."""
    redispatch: Function | None = None  # looked up by the first call: before, nobody shall get the op from torch
    any_requires_grad, is_grad_enabled = torch._C._any_requires_grad, torch._C.is_grad_enabled
    below, keys_below = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    call = _Call()
    differentiated: Function | None = None  # made when a gradient is first wanted, so that declaring the op need not

    def autograd(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        nonlocal differentiated, redispatch
        if is_grad_enabled() and any_requires_grad(*args):
            if differentiated is None:
                differentiated = _function(op, backward, setup_context, call).apply
            call.keys, call.kwargs = keys, kwargs
            return differentiated(*args)
        if redispatch is None:
            redispatch = op.overload.redispatch
        with below():
            return redispatch(keys & keys_below, *args, **kwargs)

    return autograd


def _function(op: Op, backward: Function, setup_context: Function | None, call: _Call) -> Any:
    """The op as a torch.autograd.Function."""
    redispatch = op.overload.redispatch
    below, keys_below = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    arguments = op.overload._schema.arguments
    positional = tuple(argument.default_value for argument in arguments if not argument.kwarg_only)
    named = {argument.name: argument.default_value for argument in arguments if argument.kwarg_only}

    def forward(ctx: Any, *args: Any) -> Any:
        keys, kwargs = call.keys, call.kwargs
        with below():
            result = redispatch(keys & keys_below, *args, **kwargs)
            if setup_context is not None:
                inputs = args + positional[len(args):]  # torch leaves out what equals its default
                if named:
                    setup_context(ctx=ctx, inputs=inputs, keyword_only_inputs={**named, **kwargs}, output=result)
                else:
                    setup_context(ctx=ctx, inputs=inputs, output=result)
        return result

    def differentiate(ctx: Any, *grads: Any) -> Any:  # compiled autograd traces a function, and takes no method for one
        return backward(ctx, *grads)

    return type(op.qualified.replace("::", "_"), (torch.autograd.Function,),
                {"forward": staticmethod(forward), "backward": staticmethod(differentiate)})

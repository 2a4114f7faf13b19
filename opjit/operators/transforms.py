"""An op under torch.func and autocast. torch.func runs its transforms before autograd, so an op
with a backward also has a kernel at their dispatch key.

For example, grad, vjp, jacrev, vmap and their nestings use this kernel, and with it the op's
backward.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from opjit.declare.gradient_op import GradientOp
from opjit.declare.op_state import OpState
from opjit.errors import DeclarationError
from opjit.recipe.schema import Schema
from opjit.tensors import tensors_of

Dims = tuple[int | None, ...]


def run_backward(op: OpState, ctx: Any, *grads: Any) -> Any:
    """Run the declared backward, or raise an error that names the decorator."""
    backward = op.declaration.backward
    if backward is None:
        raise RuntimeError(
            f"derivative for {op.qualified} is not implemented; add one with @{op.schema.name}.backward"
        )
    return backward(ctx, *grads)


def run_setup_context(op: OpState, **context: Any) -> None:
    declaration = op.declaration
    setup_context = declaration.setup_context
    if isinstance(declaration.backward, GradientOp):
        setup_context = declaration.backward.save
    if setup_context is not None:
        setup_context(**context)


def run_vmap(op: OpState, info: Any, in_dims: Dims, *args: Any, **kwargs: Any) -> Any:
    """Run the declared batching rule or, without one, opjit's default rule for the op."""
    declaration = op.declaration
    if declaration.vmap is not None:
        return declaration.vmap(info, in_dims, *args, **kwargs)
    if op.schema.draws and info.randomness != "different":  # torch's words and default
        raise RuntimeError(
            f"vmap: called random operation {op.qualified} with randomness={info.randomness!r}; "
            "each element of the batch gets different numbers, so call torch.vmap(..., "
            "randomness='different')"
        )
    rule = batch_elementwise if declaration.elementwise else batch_by_loop
    return rule(op.overload, info, in_dims, args, kwargs)


def transform(op: OpState, *args: Any, **kwargs: Any) -> Any:
    """Run an op with a backward under torch.func."""
    from torch._functorch.autograd_function import custom_function_call

    args, kwargs = cast(op, args, kwargs)  # torch does so below the transforms
    return custom_function_call(_function(op, kwargs), *args)


def _function(op: OpState, kwargs: dict[str, Any]) -> Any:
    """Return the op, called with these keyword arguments, as a torch.autograd.Function that torch.func can transform."""
    overload = op.overload
    defaults = [each.default_value for each in overload._schema.arguments if not each.kwarg_only]
    named = {
        each.name: each.default_value for each in overload._schema.arguments if each.kwarg_only
    }

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return overload(*args, **kwargs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            # torch drops trailing arguments that equal their defaults.
            context = {"ctx": ctx, "inputs": (*inputs, *defaults[len(inputs) :]), "output": output}
            if named:
                context["keyword_only_inputs"] = {**named, **kwargs}
            run_setup_context(op, **context)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return run_backward(op, ctx, *grads)

        @staticmethod
        def vmap(info: Any, in_dims: Dims, *args: Any) -> Any:
            return run_vmap(op, info, in_dims, *args, **kwargs)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise no_forward_mode(overload)

    return type(op.qualified.replace("::", "_"), (Function,), {})  # a name for torch's profiler


def no_forward_mode(overload: OpOverload) -> NotImplementedError:
    """Make the error of an op in forward mode, where its results' tangents would be zero."""
    return NotImplementedError(
        f"{overload._schema.name} does not support forward mode (torch.func.jvp, jacfwd, "
        "torch.autograd.forward_ad), because a backward works in reverse mode only; use "
        "torch.autograd.grad"
    )


def batch_by_loop(
    overload: OpOverload, info: Any, in_dims: Dims, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Call the op for each element of the batch: the rule of an op without a declared rule."""
    if info.batch_size == 0:
        raise RuntimeError(
            f"{overload._schema.name} cannot be called with an empty batch, because it lacks a "
            "batching rule; declare one with @vmap"
        )
    calls = []
    for index in range(info.batch_size):
        pairs = zip(args, in_dims, strict=True)
        element = [each.select(dim, index) if isinstance(dim, int) else each for each, dim in pairs]
        calls.append(overload(*element, **kwargs))
    single = not isinstance(calls[0], tuple)
    columns = [calls] if single else list(zip(*calls, strict=True))
    if not all(isinstance(each[0], torch.Tensor) for each in columns):
        raise RuntimeError(
            f"{overload._schema.name} returns a number, and torch.vmap cannot batch numbers; return a tensor"
        )
    stacked = tuple(map(torch.stack, columns))
    return (stacked[0], 0) if single else (stacked, (0,) * len(stacked))


def batch_elementwise(
    overload: OpOverload, info: Any, in_dims: Dims, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Call the op once, with the batch as the first dimension of every tensor: the rule of an
    elementwise op.

    Because a scalar of another dtype has a lower priority in type promotion than a batch, it needs
    a call for each element.
    """
    tensors = [
        (each, dim)
        for each, dim in zip(args, in_dims, strict=True)
        if isinstance(each, torch.Tensor)
    ]
    ranks = [each.dim() - (dim is not None) for each, dim in tensors]
    if len({each.dtype for each, _ in tensors}) > 1 and 0 in ranks:
        return batch_by_loop(overload, info, in_dims, args, kwargs)
    rank = max(ranks)

    def aligned(each: Any, dim: int | None) -> Any:
        if not isinstance(each, torch.Tensor) or (dim is None and each.dim() == 0):
            return each
        batch = each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
        return batch[(slice(None), *(None,) * (rank + 1 - batch.dim()))]

    result = overload(*map(aligned, args, in_dims), **kwargs)
    return result, (0,) * len(result) if isinstance(result, tuple) else 0


def bind_autocast(op: OpState) -> bool:
    """Convert floating-point arguments in regions of torch.autocast."""
    assert op.library is not None
    for device in ("cpu", "cuda", torch._C._get_privateuse1_backend_name()):
        key = f"Autocast{torch._C._dispatch_key_for_device(device)}"
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        op.library.impl(op.schema.name, partial(_cast_first, op, keys), key)
    return True


def _cast_first(op: OpState, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast(op, args, kwargs)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return op.overload(*args, **kwargs)


def tensor_names(schema: Schema, only: Sequence[str]) -> tuple[str, ...]:
    """Return names of Tensor arguments. Raises DeclarationError for another name."""
    known = [each.name for each in schema.arguments if each.kind == "Tensor"]
    wrong = [name for name in only if name not in known]
    if isinstance(only, str) or wrong:
        raise DeclarationError(
            f"{schema.qualified} has no Tensor {', '.join(wrong) or only}: only= is a list of {', '.join(known)}"
        )
    return tuple(only)


def cast(
    op: OpState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a call's floating-point tensors by the op's rule, if autocast is on for their device."""
    rule = op.declaration.autocast
    if rule is None:
        return args, kwargs
    from torch.amp.autocast_mode import _cast

    tensors = tensors_of((args, kwargs))
    device = tensors[0].device.type if tensors else "cpu"
    if not torch.is_autocast_enabled(device):
        return args, kwargs
    dtype, only = rule
    wanted = dtype or torch.get_autocast_dtype(device)

    def converted(name: str, value: Any) -> Any:
        return _cast(value, device, wanted) if only is None or name in only else value

    names = [each.name for each in op.schema.arguments]
    positional = tuple(map(converted, names, args))
    return positional, {name: converted(name, value) for name, value in kwargs.items()}

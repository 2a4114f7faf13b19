"""An op under torch.func and autocast. torch.func runs its transforms before autograd, so an op with a backward also has a kernel at their
dispatch key. Through it go grad, vjp, jacrev, vmap and their nestings, with the op's own backward."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from opjit.declare.sample import tensors_of
from opjit.errors import DeclarationError
from opjit.recipe.schema import Schema

Op = Any  # of op.py, which imports this file
Dims = tuple[int | None, ...]
AutocastRule = tuple[
    "torch.dtype | None", "frozenset[int | str] | None"
]  # None is the region's dtype, and all arguments


def has_list(schema: Schema) -> bool:
    """Whether an op takes or returns a list of tensors, which torch.func cannot transform."""
    return any(each.list and each.kind == "Tensor" for each in schema.arguments) or any(
        each.list for each in schema.results
    )


def transform(op: Op, *args: Any, **kwargs: Any) -> Any:
    """What torch.func does with an op that has a backward."""
    from torch._functorch.autograd_function import custom_function_call

    args, kwargs = op.cast(args, kwargs)  # which torch would do below the transforms
    return custom_function_call(_function(op, kwargs), *args)


def _function(op: Op, kwargs: dict[str, Any]) -> Any:
    """Return the op, called with these keyword arguments, as a torch.autograd.Function that torch.func can transform."""
    overload, arguments = op.overload, op.overload._schema.arguments
    positional = tuple(argument.default_value for argument in arguments if not argument.kwarg_only)
    named = {argument.name: argument.default_value for argument in arguments if argument.kwarg_only}

    def forward(*args: Any) -> Any:
        return overload(*args, **kwargs)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        inputs += positional[
            len(inputs) :
        ]  # torch drops trailing arguments that equal their defaults
        if named:
            op.run_setup_context(
                ctx=ctx, inputs=inputs, keyword_only_inputs={**named, **kwargs}, output=output
            )
        else:
            op.run_setup_context(ctx=ctx, inputs=inputs, output=output)

    def batched(info: Any, in_dims: Dims, *args: Any) -> Any:
        return op.run_vmap(info, in_dims, *args, **kwargs)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode(overload)

    functions = {
        "forward": forward,
        "setup_context": keep,
        "backward": op.run_backward,
        "vmap": batched,
        "jvp": jvp,
    }
    return type(
        op.qualified.replace("::", "_"),
        (torch.autograd.Function,),
        {name: staticmethod(function) for name, function in functions.items()},
    )


def no_forward_mode(overload: OpOverload) -> NotImplementedError:
    """Make the error of an op in forward mode, where its results' tangents would be zero."""
    return NotImplementedError(
        f"{overload._schema.name} has no rule for forward mode (torch.func.jvp, jacfwd, torch.autograd.forward_ad); "
        "a backward serves reverse mode only: torch.autograd.grad"
    )


def loop(
    overload: OpOverload, info: Any, in_dims: Dims, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Call the op for each element of the batch: the rule of an op that declares none."""
    if info.batch_size == 0:
        raise RuntimeError(
            f"{overload._schema.name} has no rule for a batch of no element; declare one with @vmap"
        )
    calls = [
        overload(
            *(
                each if dim is None else each.select(dim, i)
                for each, dim in zip(args, in_dims, strict=True)
            ),
            **kwargs,
        )
        for i in range(info.batch_size)
    ]
    single = not isinstance(calls[0], tuple)
    columns = [calls] if single else list(zip(*calls, strict=True))
    if not all(isinstance(each[0], torch.Tensor) for each in columns):
        raise RuntimeError(
            f"{overload._schema.name} returns a number, and torch.vmap cannot batch numbers; return a tensor"
        )
    stacked = tuple(map(torch.stack, columns))
    return (stacked[0], 0) if single else (stacked, (0,) * len(stacked))


def elementwise(
    overload: OpOverload, info: Any, in_dims: Dims, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Call the op once, with the batch as the first dimension of every tensor: the rule of an elementwise op. A scalar of another dtype
    counts for less than a batch's, so it takes a call for each element."""
    tensors = [
        (each, dim)
        for each, dim in zip(args, in_dims, strict=True)
        if isinstance(each, torch.Tensor)
    ]
    ranks = [each.dim() - (dim is not None) for each, dim in tensors]
    if len({each.dtype for each, _ in tensors}) > 1 and 0 in ranks:
        return loop(overload, info, in_dims, args, kwargs)
    rank = max(ranks)

    def aligned(each: Any, dim: int | None) -> Any:
        if not isinstance(each, torch.Tensor) or (dim is None and each.dim() == 0):
            return each
        batch = each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
        return batch[(slice(None), *(None,) * (rank + 1 - batch.dim()))]

    result = overload(*map(aligned, args, in_dims), **kwargs)
    return result, (0,) * len(result) if isinstance(result, tuple) else 0


def bind_autocast(op: Op) -> None:
    """Convert floating-point arguments in regions of torch.autocast."""
    for device in ("cpu", "cuda", torch._C._get_privateuse1_backend_name()):
        key = f"Autocast{torch._C._dispatch_key_for_device(device)}"
        op.handle.impl(
            op.schema.name,
            partial(_cast_first, op, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))),
            key,
        )


def _cast_first(op: Op, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = op.cast(args, kwargs)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return op.overload(*args, **kwargs)


def places(schema: Schema, names: Sequence[str]) -> frozenset[int | str]:
    """Return the positions of Tensor arguments, and the names of keyword-only ones. Raises DeclarationError for another name."""
    known: dict[str, int | str] = {
        each.name: each.name if each.keyword_only else index
        for index, each in enumerate(schema.arguments)
        if each.kind == "Tensor"
    }
    wrong = [name for name in names if name not in known]
    if isinstance(names, str) or wrong:
        raise DeclarationError(
            f"{schema.qualified} has no Tensor {', '.join(wrong) or names}: only= is a list of {', '.join(known)}"
        )
    return frozenset(known[name] for name in names)


def cast(
    args: tuple[Any, ...], kwargs: dict[str, Any], rule: AutocastRule
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a call's floating-point tensors, if autocast is on for their device."""
    from torch.amp.autocast_mode import _cast

    device, (dtype, only) = (
        next((tensor.device.type for tensor in tensors_of((args, kwargs))), "cpu"),
        rule,
    )
    if not torch.is_autocast_enabled(device):
        return args, kwargs

    def converted(place: int | str, value: Any) -> Any:
        return (
            _cast(value, device, dtype or torch.get_autocast_dtype(device))
            if only is None or place in only
            else value
        )

    return tuple(map(converted, range(len(args)), args)), {
        name: converted(name, value) for name, value in kwargs.items()
    }

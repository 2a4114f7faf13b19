"""What autograd does with an op: differentiate it by its backward, or take its results as constants."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from opjit.declare import transforms
from opjit.declare.sample import tensors_of

Op = Any  # of op.py, which imports this file


def bind(op: Op) -> bool:
    """Make the op differentiable, also in torch.func. Its backward may be an error: without any kernel, torch would only warn, and treat
    the results as constants. `torch.library.register_autograd` registers the same kernel, but refuses an op that writes an argument.
    Returns whether there is a kernel that does nothing to a call which needs no derivative; then `cpp_autograd` has the same in C++."""
    schema, overload = op.schema, op.overload
    if (
        schema.mutates
        and not schema.returned
        and not any(result.kind == "Tensor" for result in schema.results)
    ):
        return False  # no result could have a derivative
    differentiate = make_autograd_impl(
        overload, Info(partial(_trimmed, op.run_backward), op.run_setup_context)
    )
    by_keyword = any(
        argument.keyword_only and argument.kind == "Tensor" for argument in schema.arguments
    )
    no_handles = schema.draws and torch.torch_version.TorchVersion(torch.__version__) < "2.13"

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(each).tangent is not None for each in tensors_of((args, kwargs))
        ):
            raise transforms.no_forward_mode(overload)  # the results' tangents would be zero
        if (
            torch.is_grad_enabled()
            and (
                schema.returned or by_keyword
            )  # torch has no derivative there, and would not say so
            and any(
                each.requires_grad
                for each in tensors_of((args, kwargs) if schema.returned else kwargs)
            )
        ):
            does = (
                "writes an argument and returns it"
                if schema.returned
                else "takes a Tensor by keyword only"
            )
            raise RuntimeError(
                f"{schema.qualified} {does}, which has no derivative, but one of its tensors requires a gradient; call it "
                "under torch.no_grad(), or with .detach()"
            )
        if no_handles and any(
            isinstance(each, torch.Generator) for each in (*args, *kwargs.values())
        ):
            raise NotImplementedError(
                f"{schema.qualified} takes a generator with torch 2.13 or later, and this is {torch.__version__}; "
                "leave it out and seed the device's own, with torch.manual_seed"
            )
        return differentiate(keys, *args, **kwargs)

    op.handle.impl(schema.name, kernel, "Autograd", with_keyset=True)
    if not schema.mutates and not transforms.has_list(schema):
        op.handle.impl(
            schema.name, partial(transforms.transform, op), "FuncTorchDynamicLayerFrontMode"
        )
    return not no_handles


def _trimmed(backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    """Drop a backward's Nones for trailing arguments that equal their defaults: torch drops those arguments, and takes no gradient."""
    result, passed = backward(ctx, *grads), len(ctx.needs_input_grad)
    return (
        result[:passed]
        if isinstance(result, tuple) and not any(one is not None for one in result[passed:])
        else result
    )

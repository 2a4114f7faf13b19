"""The rule for autograd: differentiate an op by its backward, or treat its results as constants."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from opjit.declare.op_state import OpState
from opjit.errors import OpjitError
from opjit.operators import transforms
from opjit.tensors import tensors_of


def bind_backward(op: OpState) -> bool:
    """Make the op differentiable in eager code and in torch.func.

    If the op cannot be differentiated, the backward raises an error: without any kernel, torch
    would only warn and treat the results as constants. `torch.library.register_autograd` registers
    the same kernel, but rejects an op that writes an argument. Returns whether the kernel passes
    calls through that do not need a derivative. `cpp_autograd` then has the same kernel in C++.
    """
    schema = op.schema
    overload = op.overload
    if (
        schema.mutates
        and not schema.returned
        and not any(result.kind == "Tensor" for result in schema.results)
    ):
        return False  # no result could have a derivative

    @cache
    def differentiate() -> Callable[..., Any]:
        """Make torch's kernel at the first call: it takes 0.5 ms, which `import opjit` would wait for, for each op."""
        functions = Info(partial(_run_trimmed, op), partial(transforms.run_setup_context, op))
        return make_autograd_impl(overload, functions)

    # torch lacks a derivative for these ops, and would not report it.
    problem = ""
    if schema.returned:
        problem = "writes an argument and returns it"
    elif any(each.keyword_only and each.kind == "Tensor" for each in schema.arguments):
        problem = "has a keyword-only Tensor"
    no_handles = schema.draws and torch.__version__ < "2.13"

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(each).tangent is not None for each in tensors_of((args, kwargs))
        ):
            raise transforms.no_forward_mode(overload)  # the results' tangents would be zero
        if problem and torch.is_grad_enabled():
            tensors = tensors_of((args, kwargs) if schema.returned else kwargs)
            if any(each.requires_grad for each in tensors):
                raise RuntimeError(
                    f"{schema.qualified} {problem}, so torch cannot differentiate it, but one of its "
                    "tensors requires a gradient; call it under torch.no_grad(), or pass "
                    "tensor.detach()"
                )
        if no_handles and any(
            isinstance(each, torch.Generator) for each in (*args, *kwargs.values())
        ):
            raise NotImplementedError(
                f"{schema.qualified} accepts a generator with torch 2.13 or later, but this is "
                f"torch {torch.__version__}; omit it and seed the device's default generator with "
                "torch.manual_seed"
            )
        try:
            return differentiate()(keys, *args, **kwargs)
        except OpjitError as error:
            raise error.with_traceback(
                None
            ) from error.__cause__  # the frames below do not help a user

    assert op.library is not None
    op.library.impl(schema.name, kernel, "Autograd", with_keyset=True)
    if not schema.mutates and not schema.has_tensor_list:
        transform = partial(transforms.transform, op)
        op.library.impl(schema.name, transform, "FuncTorchDynamicLayerFrontMode")
    return not no_handles


def _run_trimmed(op: OpState, ctx: Any, *grads: Any) -> Any:
    """Run the backward, without its Nones for trailing arguments that equal their defaults: torch drops those arguments."""
    result = transforms.run_backward(op, ctx, *grads)
    passed = len(ctx.needs_input_grad)
    if isinstance(result, tuple) and all(each is None for each in result[passed:]):
        return result[:passed]
    return result

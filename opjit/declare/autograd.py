"""What autograd does with an op: run its backward, raise an error because it has none, or take its results for constants.

A declared backward takes 0.78 of the time of torch.library.register_autograd per differentiable call (benchmarks/call.py): torch reads
the schema and wraps its arguments anew in each call; here the schema is read once. That needs functions private to torch: where one is
missing, or the op takes or returns a list of Tensors, torch's own register_autograd binds the backward.

Each function registers one of the three, and returns a function that takes it back.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from opjit.declare import transforms
from opjit.recipe.schema import Schema

Function = Callable[..., Any]
PRIVATE = ("_any_requires_grad", "_AutoDispatchBelowAutograd", "_after_autograd_keyset")  # of torch._C
# torch::autograd::autogradNotImplementedFallback(), torch::Library::_impl(name, function, mode) and torch::CppFunction's destructor.
REFUSING = ("_ZN5torch8autograd30autogradNotImplementedFallbackEv", "_ZNR5torch7Library5_implEPKcONS_11CppFunctionENS_17_RegisterOrVerifyE",
            "_ZN5torch11CppFunctionD1Ev")
_SIZE_OF_CPP_FUNCTION = 4096  # bytes, far more than it has


class _Call(threading.local):
    """Passed beside torch.autograd.Function.apply, which would take them for inputs of the op."""

    keys: torch._C.DispatchKeySet
    kwargs: dict[str, Any]


def bind(schema: Schema, overload: OpOverload, backward: Function, setup_context: Function, vmap: Function | None = None,
         cast: Function | None = None) -> Function:
    """Make ``backward(ctx, *grads)`` the op's.

    Args:
        backward, setup_context: as torch.library.register_autograd takes them.
        vmap: as torch.library.register_vmap takes it; None leaves torch.func's transforms to torch.
        cast: gives a call's arguments as autocast converts them.
    """
    library = torch.library.Library(schema.namespace, "FRAGMENT")
    takes_list = any(argument.list and argument.kind == "Tensor" for argument in schema.arguments)
    if takes_list or any(result.list for result in schema.results) or not all(hasattr(torch._C, name) for name in PRIVATE):
        torch.library.register_autograd(schema.qualified, _trimmed(backward), setup_context=setup_context, lib=library)
    else:
        library.impl(schema.name, _kernel(overload, backward, setup_context), "Autograd", with_keyset=True)
        if vmap is not None and cast is not None:
            transforms.bind(library, schema, overload, backward, setup_context, vmap, cast)
    return library._destroy


def constant(schema: Schema) -> Function:
    """Make autograd take the op's results for constants."""
    library = torch.library.Library(schema.namespace, "FRAGMENT")
    library.impl(schema.name, torch.library.fallthrough_kernel, "Autograd")
    return library._destroy


def refuse(schema: Schema, overload: OpOverload) -> Function:
    """Make every derivative of the op an error; without any kernel, torch only warns, and takes the results for constants.

    torch's own kernel for this costs a call a fifth of a microsecond, one in Python several. Python cannot register it by a public
    name, so its C++ functions are called by theirs; where one is missing, the kernel is in Python. So it is for an op that writes an
    argument: torch's kernel would hide from autograd that the tensor's version was counted up.
    """
    if schema.mutates and not any(result.kind == "Tensor" for result in schema.results):
        return lambda: None  # it has no result to take for a constant
    functions = None if schema.mutates else _refusing_functions()
    if functions is None:
        return _refuse_in_python(schema, overload)
    make, register, destroy, create, delete = functions
    library, kernel = ctypes.c_void_p(), ctypes.create_string_buffer(_SIZE_OF_CPP_FUNCTION)
    if create(schema.namespace.encode(), b"Autograd", b"opjit", 0, ctypes.byref(library)) != 0:
        return _refuse_in_python(schema, overload)
    make(kernel)
    register(library, schema.name.encode(), kernel, 0)
    destroy(kernel)
    return functools.partial(delete, library)


@functools.cache
def _refusing_functions() -> tuple[Function, ...] | None:
    """The functions of REFUSING, then those that create and delete a torch::Library; None if this torch lacks one.

    Only for x86-64, where a function that returns a class takes the address of the result as its first argument.
    """
    if platform.machine() != "x86_64":
        return None
    torch_libraries = ctypes.CDLL(torch._C.__file__)  # with all that it is linked with
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    arguments = {REFUSING[0]: [pointer], REFUSING[1]: [pointer, text, pointer, number], REFUSING[2]: [pointer],
                 "aoti_torch_library_init_impl": [text, text, text, ctypes.c_uint32, pointer],
                 "aoti_torch_delete_library_object": [pointer]}
    if not all(hasattr(torch_libraries, name) for name in arguments):
        return None
    for name, types in arguments.items():
        getattr(torch_libraries, name).argtypes = types
    return tuple(getattr(torch_libraries, name) for name in arguments)


def _refuse_in_python(schema: Schema, overload: OpOverload) -> Function:
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"derivative for {schema.qualified} is not implemented")

    def setup_context(**given: Any) -> None:
        """Keep nothing for such a backward."""

    return bind(schema, overload, backward, setup_context)


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
        if forward_ad._current_level >= 0:
            _refuse_tangents(overload, (*args, *kwargs.values()))
        if is_grad_enabled() and any_requires_grad(*args):
            if differentiated is None:
                differentiated = _function(overload, backward, setup_context, call).apply
            call.keys, call.kwargs = keys, kwargs
            return differentiated(*args)
        with below():
            return redispatch(keys & keys_below, *args, **kwargs)

    return autograd


def _refuse_tangents(overload: OpOverload, values: tuple[Any, ...]) -> None:
    """Raise an error in forward mode, which has no use for a backward: the results' tangents would be zero."""
    if any(isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values):
        raise transforms.no_forward_mode(overload)


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

"""Variants of an op: the same source with different definitions.

If an op ``ns::name`` has variants, opjit registers two more ops with torch. C calls ``name_choose``
with a call's arguments if it has no recorded choice for their sizes. Checks and torch's compiler
call ``name_variant`` with the number of the variant to run as an additional first argument.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from opjit import backends
from opjit.declare import fake_kernel
from opjit.declare.op_state import OpState
from opjit.environment import is_on
from opjit.errors import DeclarationError, NoKernel
from opjit.recipe.schema import Result


def combinations(
    op: OpState, device: str | None, values: Mapping[str, Sequence[object]]
) -> list[dict[str, object]]:
    """Return every combination of the values of definitions.

    Raises DeclarationError if they are not lists of numbers and strings, or if the op has results
    of several types, because torch up to 2.14 confuses them when C calls an op.
    """
    if len({result._replace(name="") for result in op.schema.results}) > 1:
        raise DeclarationError(
            f"{op.qualified} returns values of several types, and an op with variants returns Tensors, or one value; "
            "return numbers as Tensors"
        )
    if device not in (None, "cpu", "cuda") or not values:
        raise DeclarationError(
            f"{op.qualified}: variants are declared as variants('cpu', TILE=(64, 128)), for 'cpu', 'cuda' or, without "
            f"a device, for both; this one has {device!r} and {len(values)} definitions"
        )
    for name, each in values.items():
        if (
            not isinstance(each, (list, tuple, range))
            or not each
            or not all(type(value) in (int, str) for value in each)
        ):
            raise DeclarationError(
                f"{op.qualified}: expected a list of numbers or strings for each definition of "
                f"variants, for example {name}=(1, 2), got {name}={each!r}"
            )
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


def label(definitions: Mapping[str, object]) -> str:
    """Return the name of a variant, ``"TILE=64 UNROLL=1"``."""
    return " ".join(f"{name}={value}" for name, value in definitions.items())


def bind_variants(op: OpState) -> bool:
    """Register the two additional ops of an op with variants."""
    assert op.library is not None
    name = op.schema.name
    rest = op.schema.text.partition("(")[2]
    for other, first in ((f"{name}_choose", ""), (f"{name}_variant", "int variant, ")):
        op.library.define(f"{other}({first}{rest}", tags=op.overload.tags)
        op.library.impl(
            other,
            partial(_run_variant, op, bool(first)),
            "CompositeExplicitAutograd",
            with_keyset=True,
        )
        op.library.impl(other, torch.library.fallthrough_kernel, "Autograd")
    fake_kernel.register(
        op.library,
        f"{op.qualified}_variant",
        lambda variant, *args, **kwargs: op.declaration.fake(*args, **kwargs),
    )
    return True


def feed_inductor(op: OpState) -> bool:
    """Register the variants with torch's compiler if this process uses it.

    Under max_autotune, the compiler measures the variants for the sizes of a graph. Otherwise, or
    if the compiler does not support the op, a graph calls the op, which picks a variant like in
    every other call. Returns True if nothing is left to register.
    """
    if "torch._inductor.compile_fx" not in sys.modules or op.library is None:
        return False
    schema = op.schema
    tensors = [argument for argument in schema.arguments if argument.kind == "Tensor"]
    leading = all(argument.plain for argument in schema.arguments[: len(tensors)])
    single = [result._replace(name="") for result in schema.results] == [Result("", "Tensor")]
    if torch.__version__ < "2.13" or schema.mutates or schema.draws or not (leading and single):
        return True
    from torch._inductor import config
    from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
    from torch._inductor.virtualized import V

    def numbered(number: int) -> Callable[..., Any]:
        def variant(*args: Any, **kwargs: Any) -> Any:
            return getattr(getattr(torch.ops, schema.namespace), f"{schema.name}_variant")(
                number, *args, **kwargs
            )

        return variant

    def configs(tensors: Mapping[str, torch.Tensor]) -> list[CustomOpConfig]:
        labels = op.declaration.labels(
            backends.for_device(next(iter(tensors.values())).device.type)
        )
        wanted = config.max_autotune and not V.aot_compilation and is_on("OPJIT_TUNE", unset=True)
        return [CustomOpConfig(numbered(number)) for number in range(len(labels) if wanted else 0)]

    register_custom_op_autotuning(op.overload, config_generator=configs)
    return True


def _run_variant(
    op: OpState, numbered: bool, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any
) -> Any:
    """Run the variant with the number in a call's first argument or, without a number, the
    recorded variant for its tensors.
    """
    number: int | None = None
    if numbered:
        number, *rest = args
        args = tuple(rest)
    # torch's compiler switches this key on while it measures.
    keys = keys.remove(torch._C.DispatchKey.PythonDispatcher)
    backend = backends.for_dispatch_key(torch._C._dispatch_key_name(keys.highestPriorityTypeId()))
    if backend is None or (
        number is not None and not 0 <= number < len(op.declaration.labels(backend))
    ):
        raise NoKernel(
            f"{op.qualified} lacks a variant {number} for {backend.name if backend else keys}"
        )
    from opjit import tune  # late: only an op with variants needs it

    kernel = tune.kernel_for_call(op, backend, number, args, kwargs)
    force = op.loaded[backend.name].registered.opjit_force_variant
    force(kernel)
    try:
        return op.overload.redispatch(keys, *args, **kwargs)
    finally:
        force(None)

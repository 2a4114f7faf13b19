"""Checks of an op's fake kernel: of its signature when it is declared, and of its results when torch traces a call."""

import inspect
from typing import Any

import torch

from opjit.declare.declaration import Declaration, Function
from opjit.errors import DeclarationError
from opjit.recipe.schema import Result, Schema, spelled
from opjit.tensors import tensors_of

_NUMBERS: dict[str, tuple[type, ...]] = {
    "int": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "bool": (bool, torch.SymBool),
}


def register(
    library: torch.library.Library, qualified: str, fake: Function, place: str = "opjit"
) -> None:
    """Register a fake kernel like torch.library.register_fake, which searches all modules for the caller's and reads its source."""
    entry = torch._library.simple_registry.singleton.find(qualified)
    handle = entry.fake_impl.register(fake, place, lib=library)
    library._registration_handles.append(handle)


def check_signature(schema: Schema, fake: Function) -> None:
    """Bind the calls that torch makes: with all arguments, and without arguments that equal their defaults.

    Raises DeclarationError if one does not bind, or a default differs from the schema's.
    """
    try:
        signature = inspect.signature(fake)
    except (TypeError, ValueError):
        return  # a function in C without a signature
    arguments = torch._C.parse_schema(schema.text).arguments
    positional = [each for each in arguments if not each.kwarg_only]
    named = [each for each in arguments if each.kwarg_only]
    required = [each for each in positional if not each.has_default_value()]
    required_named = [each for each in named if not each.has_default_value()]
    for count, by_name in ((len(positional), named), (len(required), required_named)):
        values: list[object] = [None] * count
        keywords: dict[str, object] = {each.name: None for each in by_name}
        try:
            signature.bind(*values, **keywords)
        except TypeError as error:
            shown = ", ".join([*(each.name for each in positional[:count]), *keywords])
            raise DeclarationError(
                f"{line_of(fake)}: the fake kernel of {schema.qualified} cannot be called with ({shown}): {error}; "
                f"give it the arguments and defaults of {schema.text}"
            ) from None
    parameters = list(signature.parameters.values())
    for index, argument in enumerate(arguments):
        parameter = signature.parameters.get(argument.name)
        if not argument.kwarg_only:
            parameter = parameters[index] if index < len(parameters) else None
        if parameter is not None and _differs(argument, parameter):
            raise DeclarationError(
                f"{line_of(fake)}: the fake kernel of {schema.qualified} has the default "
                f"{parameter.name}={parameter.default!r}, and the schema has {argument.default_value!r}; make them equal"
            )


def _differs(argument: Any, parameter: inspect.Parameter) -> bool:
    """Return whether a parameter has another default than the schema, which writes a dtype as a number."""
    default = parameter.default
    if default is inspect.Parameter.empty or not argument.has_default_value():
        return False
    if isinstance(default, torch.dtype):
        return False
    if isinstance(default, tuple):
        default = list(default)
    return bool(default != argument.default_value)


def check_results(declaration: Declaration, value: Any, device: torch.device | None) -> None:
    """Raise DeclarationError if a fake kernel returned other results than its schema: in number, type or device."""
    results = declaration.schema.results
    if not results:
        if value is None or value == ():
            return
        raise _wrong(declaration, "a value", "returns nothing")
    values = [value]
    if len(results) > 1:
        if not isinstance(value, (tuple, list)) or len(value) != len(results):
            found = f"{len(value)} values" if isinstance(value, (tuple, list)) else _shown(value)
            raise _wrong(declaration, found, f"returns {len(results)} values")
        values = list(value)
    for number, (result, each) in enumerate(zip(results, values, strict=True), start=1):
        if not _fits(result, each):
            expected = f"has {spelled(result._replace(name=''))} as result {number}"
            raise _wrong(declaration, _shown(each), expected)
        for tensor in tensors_of(each):
            if device is not None and not _same(tensor.device, device):
                found = f"a tensor on {tensor.device}"
                raise _wrong(declaration, found, f"was called with tensors on {device}")


def _wrong(declaration: Declaration, found: str, expected: str) -> DeclarationError:
    return DeclarationError(
        f"{line_of(declaration.fake)}: the fake kernel of {declaration.qualified} returned {found}, and the op {expected}: "
        f"{declaration.schema.text}"
    )


def _fits(result: Result, value: Any) -> bool:
    if result.optional and value is None:
        return True
    if result.list:
        return isinstance(value, (tuple, list)) and len(tensors_of(value)) == len(value)
    if result.kind == "Tensor":
        return isinstance(value, torch.Tensor)
    if isinstance(value, bool) and result.kind != "bool":
        return False
    return isinstance(value, _NUMBERS[result.kind])


def _same(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices are equal. A device without an index is the current device."""
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def line_of(function: Function) -> str:
    """Return ``FILE:LINE`` of a function, for messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)

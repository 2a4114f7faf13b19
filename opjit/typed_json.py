"""Values of JSON as records. The text may be damaged or hostile, so each value must have its type.

A record is a NamedTuple or a dataclass. Its fields have one of these types: str, int, float, bool,
None, Any, a Literal, a union, a list, a tuple of any length, a dict, or another record.
"""

import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from inspect import Signature, signature
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_signature: Callable[[Any], Signature] = cache(signature)
_fields: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def typed(value: Any, hint: Any) -> Any:
    """Return a value of JSON as the type that a hint names.

    Raises TypeError with the expected type, or RecursionError.

    Example:
        >>> typed([1, 2], tuple[int, ...])
        (1, 2)
    """
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for option in get_args(hint):
            with suppress(TypeError):
                return typed(value, option)
    elif origin is tuple and isinstance(value, list):
        return tuple(typed(each, get_args(hint)[0]) for each in value)
    elif origin is list and isinstance(value, list):
        return [typed(each, get_args(hint)[0]) for each in value]
    elif origin is dict and isinstance(value, dict):
        return {name: typed(each, get_args(hint)[1]) for name, each in value.items()}
    elif origin is Literal and value in get_args(hint):
        return value
    elif (is_dataclass(hint) or hasattr(hint, "_fields")) and isinstance(value, dict):
        return _record(value, hint)
    elif hint is float and type(value) is int and abs(value) < 1 << 1023:
        return float(value)
    elif type(value) is hint:
        return value
    expected = hint.__name__ if origin is None and isinstance(hint, type) else hint
    raise TypeError(f"expected {expected}, got {str(value)[:40]!r}")


def _record(values: dict[str, Any], kind: Any) -> Any:
    _signature(kind).bind(**values)  # raises TypeError for a missing or an unknown field
    found = {}
    for name, value in values.items():
        try:
            found[name] = typed(value, _fields(kind)[name])
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
    return kind(**found)

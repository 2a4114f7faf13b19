"""Tables of functions for parametrized tests."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Cases(dict[str, Function]):
    """Functions by the names of their cases, in the order of the text.

    Example:
        >>> DAMAGES = Cases[Callable[[Path], object]]()
        >>> @DAMAGES("empty")
        ... def _(path):
        ...     path.write_bytes(b"")
    """

    def __call__(self, name: str) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            assert name not in self, f"two cases are named {name}"
            self[name] = function
            return function

        return add

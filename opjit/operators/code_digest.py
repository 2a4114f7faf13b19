"""A digest of functions: of their code and of every value that they read, so that equal digests mean equal behavior in two processes."""

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
# Packages with a version that describes their code.
_VERSIONED = frozenset({*sys.stdlib_module_names, "numpy", "opjit", "torch"})
_CLASS_NOISE = frozenset({"__dict__", "__doc__", "__firstlineno__", "__weakref__"})
_LIMIT = 20_000  # values


def digest(value: object) -> tuple[str, list[str]]:
    """Return a digest, and descriptions of the values that it cannot cover.

    Such a value is replaced by its identity in this process.
    """
    reader = _Reader()
    try:
        reader.read(value)
    except RecursionError:
        reader.read_identity(value)
    text = "\n".join(reader.words)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), reader.unknown


class _Reader:
    """Spells values as words. A value that was read before is spelled as its number, so that a cycle ends."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.unknown: list[str] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id is used again once its object is gone
        self._names: set[str] = set()  # that the current function reads
        self._attributes: set[tuple[int, str]] = set()  # of modules, by id and name

    def read(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.words.append(f"{kind.__name__} {value!r}")
            return
        if isinstance(value, ModuleType):  # never "again": another function may read other names
            self._read_module(value)
            return
        if id(value) in self._numbers:
            self.words.append(f"again {self._numbers[id(value)]}")
            return
        if len(self._numbers) >= _LIMIT:
            self.read_identity(value)
            return
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        self.words.append(f"{kind.__module__}.{kind.__qualname__}")
        self._read_parts(value)

    def read_identity(self, value: object) -> None:
        """Spell a value that exists only in this process."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.unknown.append(kind)
        self.words.append(f"{kind} {id(value)} of process {_process(os.getpid())}")

    def _read_all(self, *values: object) -> None:
        self.words.append(f"{len(values)} values")
        for value in values:
            self.read(value)

    def _read_parts(self, value: Any) -> None:
        if isinstance(value, CodeType):
            self._read_code(value)
        elif isinstance(value, FunctionType):
            self._read_function(value)
        elif isinstance(value, type):
            self._read_class(value)
        elif hasattr(value, "__wrapped__"):
            self.read(value.__wrapped__)
        elif type(value) in (tuple, list):
            self._read_all(*value)
        elif type(value) is dict:
            self._read_all(*value, *value.values())
        elif type(value) in (set, frozenset):
            self._read_set(value)
        elif type(value) in (staticmethod, classmethod):
            self.read(value.__func__)
        elif type(value) is property:
            self._read_all(value.fget, value.fset, value.fdel)
        else:
            self._read_object(value)

    def _read_code(self, code: CodeType) -> None:
        self._read_all(
            code.co_code,
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_consts,
            getattr(code, "co_exceptiontable", b""),
        )

    def _read_set(self, values: set[object] | frozenset[object]) -> None:
        digests = []
        for value in values:
            text, unknown = digest(value)
            digests.append(text)
            self.unknown += unknown
        self._read_all(*sorted(digests))

    def _read_function(self, function: FunctionType) -> None:
        before = self._names
        self._names = set(_names(function.__code__))
        self._read_all(function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents)
            except ValueError:
                self.words.append("an empty cell")
        values = function.__globals__
        # `__module__` is another one under functools.wraps.
        if not self._read_version(values.get("__name__"), function.__qualname__):
            self.read(function.__code__)
            for name in sorted(self._names & values.keys()):
                self.words.append(f"global {name}")
                self.read(values[name])
        self._names = before

    def _read_module(self, module: ModuleType) -> None:
        """Read the values of a module that the current function names, for example
        ``shapes.rows``.
        """
        if self._read_version(module.__name__, ""):
            return
        for name in sorted(self._names & vars(module).keys()):
            self.words.append(f"{module.__name__}.{name}")
            if (id(module), name) not in self._attributes:
                self._attributes.add((id(module), name))
                self.read(vars(module)[name])

    def _read_class(self, value: type) -> None:
        if self._read_version(value.__module__, value.__qualname__):
            return
        self._read_all(*value.__bases__)
        for name in sorted(vars(value).keys() - _CLASS_NOISE):
            self.words.append(f"attribute {name}")
            self.read(vars(value)[name])

    def _read_version(self, module: str | None, name: str) -> bool:
        """Spell a value of a module that is described by its version.

        Returns whether this is possible.
        """
        package = (module or "").partition(".")[0]
        if package not in _VERSIONED:
            return False
        version = getattr(sys.modules.get(package), "__version__", "")
        self.words.append(f"{module}.{name} {version}")
        return True

    def _read_object(self, value: Any) -> None:
        """Read an object by its parts, like pickle."""
        if isinstance(value, torch.Tensor):
            self.read_identity(value)
            return
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self.words.append(str(value))
            return
        module = type(value).__module__
        if module == "opjit.operators.op":  # the tag has the declaration of each op
            self.words.append(value.qualified)
            return
        try:
            parts = value.__reduce_ex__(4)
        except Exception:
            self.read_identity(value)
            return
        if not isinstance(parts, str):
            self._read_all(*(list(part) if hasattr(part, "__next__") else part for part in parts))
        elif not self._read_version(getattr(value, "__module__", None) or module, parts):
            self.read_identity(value)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the functions within it read."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


@cache
def _process(number: int) -> str:
    """Return a name that no other process has, even if it has this one's number."""
    return os.urandom(8).hex()

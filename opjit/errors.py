"""Everything opjit raises: one tree, each error with its facts as attributes and a first line a person can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class OpjitError(RuntimeError):
    """Base of every error that opjit raises itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[OpjitError], args: tuple[Any, ...], facts: dict[str, Any]) -> OpjitError:
    """An error as it was in another process; its class may not be made from its message alone."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


class UnknownOp(OpjitError, KeyError):
    """No op of that name is declared.

    Attributes:
        name: the name asked for, with its namespace.
        closest: declared names that look like it, best first.
    """

    def __init__(self, name: str, closest: list[str]) -> None:
        hint = f"did you mean {' or '.join(closest)}?" if closest else "`opjit list` shows the ops there are."
        super().__init__(f"no op named {name!r} is declared; {hint}")
        self.name = name
        self.closest = closest

    __str__ = RuntimeError.__str__  # KeyError would show the quoted repr


class SchemaError(OpjitError, ValueError):
    """A schema cannot be parsed, or uses a type that opjit ops do not take."""


class DeclarationError(OpjitError):
    """An op's declaration is incomplete or contradicts itself."""


class UnknownDevice(OpjitError, ValueError):
    """No backend serves that kind of device."""


class UnknownArch(OpjitError, ValueError):
    """No backend builds for that arch."""


class DeviceUnavailable(OpjitError):
    """The backend is known, but this process has no such device."""


class NoKernel(OpjitError, NotImplementedError):
    """The op has no source for that backend, or cannot run on tensors of that kind."""


class ToolMissing(OpjitError):
    """A compiler or build tool is not there; the message says what to install.

    Attributes:
        tool: its name, such as ``"nvcc"``.
    """

    def __init__(self, tool: str, message: str) -> None:
        super().__init__(message)
        self.tool = tool


class BuildError(OpjitError):
    """A build ended without a good binary.

    Attributes:
        op: the op's qualified name.
        target: what it was built for.
        command: the compiler's command line, where one failed.
        log: the file with the complete output.
    """

    def __init__(self, message: str, *, op: str, target: str, command: str | None = None, log: Path | None = None):
        super().__init__(message)
        self.op = op
        self.target = target
        self.command = command
        self.log = log


class CompileError(BuildError):
    """The compiler or the linker refused the op's source; the first line is its first real complaint."""


class PrecompileError(OpjitError):
    """Some of what `opjit.precompile` was to build is not there.

    Attributes:
        failed: each error with the name of its op and target; the rest was built.
    """

    def __init__(self, message: str, failed: list[tuple[str, OpjitError]]) -> None:
        super().__init__(message)
        self.failed = failed


class RecordError(OpjitError):
    """A list of ops cannot be written, or is none."""


class LoadError(OpjitError):
    """A verified binary could not be loaded or registered."""


class RemoteError(OpjitError):
    """A remote, a pack or a key cannot be used as it was asked for."""


class EntryError(OpjitError):
    """A cache entry is not what its manifest says, or may not be trusted. Met inside opjit; a user sees CacheWarning."""


class UntrustedFolder(EntryError):
    """The cache lies where others could put something else in its place."""


class BadSetting(OpjitError, ValueError):
    """An argument, or a variable of the environment, has a value that means nothing."""


class UnknownEntry(OpjitError, LookupError):
    """No single entry of the cache is meant.

    Attributes:
        prefix: how its key was said to start.
        keys: all keys that start so.
    """

    def __init__(self, message: str, prefix: str, keys: list[str]) -> None:
        super().__init__(message)
        self.prefix = prefix
        self.keys = keys


class CacheWarning(UserWarning):
    """The cache could not be used as usual; the op works all the same."""


def one_string(where: str, parameter: str, given: str) -> str:
    """What to say of a string where a list of strings is wanted: each of its letters would be one."""
    return f"{where}: {parameter} is a list of strings, not the string {given!r}; write [{given!r}]"

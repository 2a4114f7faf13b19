"""The errors and warnings of opjit.

Catch `OpjitError` for all errors. Each is also a RuntimeError. The first line of a message names the remedy, and the attributes of an
error contain its details. ``opjit help NoKernel`` explains an error in a terminal.
"""

import copyreg
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class OpjitError(RuntimeError):
    """Base of all errors of opjit."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process rebuild the error without its constructor, which may need more than a message."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UnknownOp(OpjitError, KeyError):
    """No op of this name is declared.

    `name` includes the namespace, and `closest` lists similar declared names, best first.
    """

    def __init__(self, name: str, closest: list[str]) -> None:
        hint = "declare its directory with opjit.add_path(DIR) or OPJIT_PATH; `opjit list` shows the declared ops"
        if "/" in name:
            hint = "expected a name, got a path: call opjit.add_path with the path, and pass the name of the op"
        elif closest:
            hint = f"did you mean {' or '.join(closest)}?"
        super().__init__(f"no op named {name!r} is declared; {hint}")
        self.name = name
        self.closest = closest

    __str__ = RuntimeError.__str__  # KeyError shows the quoted repr


class SchemaError(OpjitError, ValueError):
    """A schema cannot be parsed, or uses a type that opjit does not support."""


class DeclarationError(OpjitError):
    """An op's declaration is incomplete or contradicts itself."""


class UnknownDevice(OpjitError, ValueError):
    """No backend supports this kind of device."""


class UnknownArch(OpjitError, ValueError):
    """No backend builds for this architecture."""


class DeviceUnavailable(OpjitError):
    """The backend is registered, but this process cannot use a device of this kind."""


class NoKernel(OpjitError, NotImplementedError):
    """The op lacks a source for this backend, or does not support this kind of tensor."""


class ToolMissing(OpjitError):
    """A compiler or build tool is missing.

    `tool` is its name, for example ``"nvcc"``. The message names the package to install.
    """

    def __init__(self, tool: str, message: str) -> None:
        super().__init__(message)
        self.tool = tool


class BuildError(OpjitError):
    """A build failed.

    `op` is the qualified name of the op, and `target` is its target. If a compiler failed, `command` is its command line, and `log` is
    the file with its complete output.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str,
        target: str,
        command: str | None = None,
        log: Path | None = None,
    ):
        super().__init__(message)
        self.op = op
        self.target = target
        self.command = command
        self.log = log


class NotCached(BuildError):
    """No cache has the binary, and OPJIT_OFFLINE forbids building it."""


class CompileError(BuildError):
    """The compiler or the linker rejected a source. The message starts with the first error."""

    read: Mapping[str, Any] | None = (
        None  # a document with what the compilers read, if they list it
    )


Failures = list[tuple[str, OpjitError]]  # the names of binaries that were not built, and why


class PrecompileError(OpjitError):
    """`opjit.precompile` could not build all entries, or `opjit.check_precompiled` did not find all of them.

    `failed` lists pairs: the name of an op with its target, and the error. All other entries exist.
    """

    def __init__(self, message: str, failed: Failures) -> None:
        super().__init__(message)
        self.failed = failed


class RecordError(OpjitError):
    """An op list cannot be written or read."""


class LoadError(OpjitError):
    """A verified binary could not be loaded or registered."""


class RemoteError(OpjitError):
    """A remote cache, an archive or a signing key cannot be used."""


class EntryError(OpjitError):
    """A cache entry does not match its manifest, or cannot be trusted. Internal: users see a CacheWarning."""


class UntrustedFolder(EntryError):
    """The cache is in a directory that other users could replace."""


class PeerLost(OpjitError):
    """Ranks of a group ended, were late, or called a different op.

    `ranks` lists their numbers in the group `group`. If an op waited for them, `op` is its name. The group cannot be used again, but the
    remaining ranks can make a smaller one.
    """

    def __init__(self, message: str, group: str, ranks: tuple[int, ...], op: str | None) -> None:
        super().__init__(message)
        self.group = group
        self.ranks = ranks
        self.op = op


class BadSetting(OpjitError, ValueError):
    """An argument or an environment variable has an invalid value."""


class CacheWarning(UserWarning):
    """The cache could not be used as usual. The op still works."""


class CompileWarning(UserWarning):
    """A compiler's warning about code that compiled, at the line of your source."""


def warn_of_cache(text: str) -> None:
    """Give a CacheWarning."""
    warnings.warn(CacheWarning(text), stacklevel=3)


def one_string(where: str, parameter: str, text: str) -> str:
    """Return the message for a string given as a list of strings, which would be read as a list of letters."""
    return f"{where}: {parameter} is a list of strings, not the string {text!r}; write [{text!r}]"

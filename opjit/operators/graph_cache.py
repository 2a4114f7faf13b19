"""The ops' part of torch.compile's cache keys.

torch.compile keeps graphs, on disk and in memory, and does not see that an op in them is declared differently (pytorch#187319): a fake
kernel of another size ends in an AssertionError, and another schema in wrong numbers. So the declarations are part of torch's cache key,
and a declaration that changes after it was traced resets torch's compiler. A kernel's code does neither."""

import sys
from types import ModuleType
from typing import Any

import torch

from opjit import processes, progress
from opjit.declare.declaration import Declaration
from opjit.operators.code_digest import digest

_MARK = " opjit:"
_lock = processes.Lock()
_in_key: dict[str, Declaration] = {}  # the declarations that are in the key, by qualified name
_traced: dict[str, str] = {}  # the digest of each declaration when torch first traced it
_told: set[str] = set()  # ops with a value that no digest covers


def add(declaration: Declaration) -> None:
    """Make a declaration part of torch's cache key from now on."""
    with _lock:
        _in_key[declaration.qualified] = declaration
        _extend_key()


def remove(qualified: str) -> None:
    with _lock:
        _in_key.pop(qualified, None)


def note_trace(declaration: Declaration) -> None:
    """Note the declaration of an op that torch's compiler may be tracing."""
    if "torch._dynamo" in sys.modules and declaration.qualified not in _traced:
        _traced[declaration.qualified] = _digest_of(declaration)


def note_change(declaration: Declaration) -> None:
    """Replace an op's declaration.

    If torch has traced a different declaration, all compiled functions compile again, because torch
    cannot find the functions that call the op.
    """
    qualified = declaration.qualified
    with _lock:
        if qualified in _in_key:
            _in_key[qualified] = declaration
    before = _traced.get(qualified)
    if before is not None and before != _digest_of(declaration):
        _traced.clear()
        torch.compiler.reset()


def _digest_of(declaration: Declaration) -> str:
    found, unknown = digest(declaration.traced_parts())
    if unknown and declaration.qualified not in _told:
        _told.add(declaration.qualified)
        progress.log(
            "later processes do not find the graphs that torch.compile keeps, because a function of "
            f"{declaration.qualified} reads a value without a digest: {', '.join(sorted(set(unknown)))}"
        )
    return found


def _extend_key() -> None:
    """Let each read of `torch.compiler.config.cache_key_tag` return the user's tag with the
    declarations.

    Setting the tag is not enough: torch keeps the value for one thread only, and a user may set
    another value later.
    """
    kind: Any = type(torch.compiler.config)
    if "cache_key_tag" not in vars(kind):
        kind.cache_key_tag = property(_tag)


def _tag(config: ModuleType) -> str:
    users: str = config.__getattr__("cache_key_tag").partition(_MARK)[0]
    with _lock:
        declarations = sorted(_in_key.items())
    if not declarations:
        return users
    found, _ = digest([(name, _digest_of(each)) for name, each in declarations])
    return f"{users}{_MARK}{found}"

"""The ops' part of torch.compile's cache keys.

torch.compile keeps graphs, on disk and in memory, and does not see that an op in them is declared differently (pytorch#187319): a fake
kernel of another size ends in an AssertionError, and another schema in wrong numbers. So the declarations are part of torch's cache key,
and a declaration that changes after it was traced resets torch's compiler. A kernel's code does neither."""

import sys
from types import ModuleType
from typing import Any

import torch

from opjit import files, processes, progress
from opjit.declare.declaration import Declaration

_MARK = " opjit:"
_lock = processes.Lock()
_declared: dict[str, Declaration] = {}  # the ops of this process, by qualified name
_in_key: set[str] = set()  # the names of the ops that are in the key
_traced: dict[str, str] = {}  # the digest of each declaration when torch first traced it
_told: set[str] = set()  # ops without a digest


def add(declaration: Declaration, bundled: bool) -> None:
    """Make a declaration part of torch's cache key: a bundled one when torch traces it, and any other from now on."""
    with _lock:
        _declared[declaration.qualified] = declaration
    if not bundled:
        _put_in_key(declaration.qualified)


def remove(qualified: str) -> None:
    with _lock:
        _declared.pop(qualified, None)
        _in_key.discard(qualified)


def note_trace(declaration: Declaration) -> None:
    """Note the declaration of an op that torch's compiler may be tracing."""
    if "torch._dynamo" in sys.modules and declaration.qualified not in _traced:
        _put_in_key(declaration.qualified)
        _traced[declaration.qualified] = _digest_of(declaration)


def note_change(declaration: Declaration) -> None:
    """Replace an op's declaration.

    If torch has traced a different declaration, all compiled functions compile again, because torch
    cannot find the functions that call the op.
    """
    qualified = declaration.qualified
    with _lock:
        _declared[qualified] = declaration
    before = _traced.get(qualified)
    if before is not None and before != _digest_of(declaration):
        _traced.clear()
        torch.compiler.reset()


def _digest_of(declaration: Declaration) -> str:
    """Return the digest of a declaration or, without one, a number that nothing else has."""
    from opjit.operators.code_digest import NoDigest, digest  # late: only torch.compile needs it

    try:
        return digest(declaration, _declared)
    except NoDigest as error:
        if declaration.qualified not in _told:
            _told.add(declaration.qualified)
            progress.log(
                "torch.compile compiles each graph again in a later process, because a function of "
                f"{declaration.qualified} reads {error}"
            )
        return files.random_name()


def _put_in_key(qualified: str) -> None:
    """Let each read of `torch.compiler.config.cache_key_tag` return the user's tag with the declarations.

    Setting the tag is not enough: torch keeps the value for one thread only, and a user may set
    another value later.
    """
    kind: Any = type(torch.compiler.config)
    with _lock:
        _in_key.add(qualified)
        if "cache_key_tag" not in vars(kind):
            kind.cache_key_tag = property(_tag)


def _tag(config: ModuleType) -> str:
    users: str = config.__getattr__("cache_key_tag").partition(_MARK)[0]
    with _lock:
        declarations = [_declared[name] for name in sorted(_in_key & _declared.keys())]
    if not declarations:
        return users
    digests = files.sha256(" ".join(map(_digest_of, declarations)))
    return f"{users}{_MARK}{digests}"

"""The part of torch.compile's cache keys that ops decide.

torch.compile keeps graphs, on disk and in memory, and does not see that an op in them is declared differently (pytorch#187319): a fake
kernel of another size ends in an AssertionError, and another schema in wrong numbers. So the declarations are part of torch's cache key,
and a declaration that changes after it was traced resets torch's compiler. A kernel's code does neither."""

import sys
from types import ModuleType
from typing import Any, Protocol

import torch

from opjit import processes, progress
from opjit.declare.code_digest import digest

_MARK = " opjit:"
_lock = processes.Lock()


class TracedOp(Protocol):
    """The part of an op that decides about its graphs."""

    @property
    def qualified(self) -> str: ...

    def traced_parts(self) -> dict[str, object]:
        """Return the parts of the declaration that decide how torch traces, differentiates and transforms the op."""


_declared: dict[str, TracedOp] = {}  # whose declarations are in the key, by qualified name
_traced: dict[str, str] = {}  # the digest of each declaration when torch first traced it
_told: set[str] = set()  # ops with a value that no digest covers


def add(op: TracedOp) -> None:
    """Make an op's declaration part of torch's cache key from now on, as it is whenever torch reads the key."""
    with _lock:
        _declared[op.qualified] = op
        _extend_key()


def remove(op: TracedOp) -> None:
    with _lock:
        _declared.pop(op.qualified, None)


def note_trace(op: TracedOp) -> None:
    """Note the declaration of an op that torch's compiler may be tracing."""
    if "torch._dynamo" in sys.modules and op.qualified not in _traced:
        _traced[op.qualified] = _digest(op)


def note_change(op: TracedOp) -> None:
    """Let compiled functions compile again if an op's declaration is another one than torch has traced. torch cannot say which of them
    call the op, so that is all of them."""
    before = _traced.get(op.qualified)
    if before is not None and before != _digest(op):
        _traced.clear()
        torch.compiler.reset()


def _digest(op: TracedOp) -> str:
    found, unknown = digest(op.traced_parts())
    if unknown and op.qualified not in _told:
        _told.add(op.qualified)
        progress.log(
            f"later processes do not find the graphs that torch.compile keeps, because a function of {op.qualified} "
            f"reads a value without a digest: {', '.join(sorted(set(unknown)))}"
        )
    return found


def _extend_key() -> None:
    """Let each read of `torch.compiler.config.cache_key_tag` return the user's tag with the declarations. Setting the tag would not do:
    torch keeps a value that is set for one thread alone, and a user may set another one later."""
    kind: Any = type(torch.compiler.config)
    if "cache_key_tag" not in vars(kind):
        kind.cache_key_tag = property(_tag)


def _tag(config: ModuleType) -> str:
    users: str = config.__getattr__("cache_key_tag").partition(_MARK)[0]
    with _lock:
        ops = sorted(_declared.items())
    if not ops:
        return users
    found, _ = digest([(name, _digest(op)) for name, op in ops])
    return f"{users}{_MARK}{found}"

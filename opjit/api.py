"""The functions `get` and `explain`: a ready op, and why it is or is not in the cache."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from opjit import backends, request
from opjit.backends import Backend, targets
from opjit.backends.cpu import Cpu
from opjit.backends.cuda import Cuda
from opjit.declare import registry
from opjit.declare.op import Op
from opjit.declare.op_state import OpState
from opjit.errors import OpjitError
from opjit.store import layers
from opjit.store.store import Store, default_root
from opjit.wanted import describe, target_of

if TYPE_CHECKING:
    from opjit.why import Explanation


@cache
def declare_all() -> None:
    """Register opjit's own backends, declare the bundled ops to torch, and let torch.ops find the others; once in a process."""
    backends.register_backend(Cpu())
    backends.register_backend(Cuda())
    registry.declare_bundled(request.ready_for_call, _choose)
    torch._ops._OpNamespace.__getattr__ = registry.get_or_search  # type: ignore[method-assign]


def _choose(
    op: OpState, backend: Backend, number: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    from opjit import tune

    return tune.kernel(op, backend, number, args, kwargs)


def get(name: str, device: object = None, *, reload: bool = False) -> torch._ops.OpOverload:
    """Make an op ready for a device, building it if no cache has it, and return it.

    Args:
        name: ``"allreduce"`` or ``"namespace::name"``.
        device: ``"cpu"``, ``"cuda"`` or a torch.device; None means the current accelerator, else the CPU.
        reload: check the op's files again, and rebuild it if they changed, for every device it was used on. Other threads may keep
            calling it; after an error it stays as it was. A changed op.py runs again, but not the modules that it imports. A changed
            schema makes a new torch operator: then use the returned overload instead of the old one.

    Returns:
        The torch operator, ``torch.ops.opjit.allreduce.default``.

    Raises:
        UnknownOp, UnknownDevice, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`.

    Example:
        >>> allreduce = opjit.get("allreduce", "cpu")
        >>> allreduce(torch.ones(3))
        tensor(3.)
    """
    if reload:
        from opjit.live.reload import reload_op

        return reload_op(name, device)
    try:
        op = registry.find(name)
        request.ready(op, backends.for_device(targets.device_type(device)))
    except OpjitError as error:
        raise error.with_traceback(
            None
        ) from error.__cause__  # the frames below tell a user nothing
    return op.overload


def explain(op: str | Op, device: object = None, arch: str | None = None) -> Explanation:
    """Explain whether `opjit.get` would find an op's binary, and where, or what changed since the nearest one was built.

    It covers ops, not the extensions of `opjit.load`. It does not ask the remote; an entry that only the remote has is a miss.

    Args:
        op: an op or its name.
        device: this machine's device of that kind; None means the current accelerator, else the CPU.
        arch: this arch (``"sm_90"``, ``"x86-64-v3"``) instead, which this machine need not have.

    Raises:
        UnknownOp, UnknownDevice, UnknownArch, DeviceUnavailable, NoKernel: see `opjit.errors`.

    Example:
        >>> print(opjit.explain("mylib::scale", "cpu"))
        mylib::scale for cpu x86-64-v…: a miss; a request would build it
          compared with the entry built …: …/opjit/v1/mylib.scale/x86-64-v…/…
            source: scale.c changed
    """
    from opjit import why

    declared = op if isinstance(op, Op) else registry.find(op)
    root = Store(default_root())
    recipe = describe(declared, target_of(device, arch), root)
    with warnings.catch_warnings():  # the explanation includes their content
        warnings.simplefilter("ignore")
        entry = layers.find(recipe) or root.find(recipe)
    return why.compare(recipe, root, entry.folder if entry else None)

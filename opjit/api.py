"""`opjit.get` and `opjit.explain`."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING

import torch

from opjit import backends, request
from opjit.backends import targets
from opjit.backends.cpu import Cpu
from opjit.backends.cuda import Cuda
from opjit.catalog import registry
from opjit.errors import OpjitError
from opjit.operators.op import Op
from opjit.store import layers
from opjit.store.store import default_store
from opjit.wanted import describe, target_of

if TYPE_CHECKING:
    from opjit.why import Explanation


# The op and the backend's name of each request that was answered. Both decide again at a later one: a kernel that was taken back, or an op
# that was declared again, is no longer in `loaded`, and a reload replaces `overload`.
_answered = dict[tuple[str, object], tuple[Op, str]]()


@cache
def declare_all() -> None:
    """Register the backends of opjit, declare the bundled ops to torch, and let torch.ops find other ops. Runs once per process."""
    backends.register_backend(Cpu())
    backends.register_backend(Cuda())
    registry.declare_bundled()
    torch._ops._OpNamespace.__getattr__ = registry.get_or_search  # type: ignore[method-assign]


def get(name: str, device: object = None) -> torch._ops.OpOverload:
    """Return an op for a device, and build it if it is not cached.

    Args:
        name: the name of an op, ``"namespace::name"``. For a bundled op, you can leave out the namespace: ``"allreduce"``.
        device: ``"cpu"``, ``"cuda"`` or a torch.device. None means the current accelerator, or the CPU.

    Returns:
        The torch operator, for example ``torch.ops.opjit.allreduce.default``.

    Raises:
        UnknownOp, UnknownDevice, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`.

    Example:
        >>> allreduce = opjit.get("allreduce", "cpu")
        >>> allreduce(torch.ones(3))
        tensor(3.)
    """
    # Requests are answered by this look-up from the second on: 0.2 us (tests/benchmarks/calls.py).
    try:
        known, backend_name = _answered[name, device]
        if backend_name in known.loaded:
            return known.overload
    except (KeyError, TypeError):  # TypeError: a device without a hash, which `device_type` refuses
        pass
    try:
        op = registry.find(name)
        backend = backends.for_device(targets.device_type(device))
        backend = backends.serving(backend, op.backends())
        request.ready(op, backend)
    except OpjitError as error:
        # A user learns nothing from the frames below.
        raise error.with_traceback(None) from error.__cause__
    if registry.is_whole(op):
        _answered[name, device] = op, backend.name
    return op.overload


def explain(op: str | Op, device: object = None, arch: str | None = None) -> Explanation:
    """Explain whether a request for an op hits or misses the cache, and why.

    After a miss, the explanation names the inputs that changed since the most similar entry was built. It does not query the remote cache,
    so an entry that is only there is a miss. For the extensions of `opjit.load`, use the command `opjit why`.

    Args:
        op: an op or its name.
        device: ``"cpu"``, ``"cuda"`` or a torch.device. None means the current accelerator, or the CPU.
        arch: an architecture other than this machine's, for example ``"sm_90"`` or ``"x86-64-v3"``.

    Returns:
        The explanation. ``print`` shows it as text.

    Raises:
        UnknownOp, UnknownDevice, UnknownArch, DeviceUnavailable, NoKernel: see `opjit.errors`.

    Example:
        >>> print(opjit.explain("mylib::scale", "cpu"))
        mylib::scale for cpu x86-64-v…: a miss; a request would build it
          compared with the entry built …: …/opjit/v2/mylib.scale/x86-64-v…/…
            source: scale.c changed
    """
    from opjit import why

    declared = op if isinstance(op, Op) else registry.find(op)
    root = default_store()
    recipe = describe(declared, target_of(device, arch), root)
    with warnings.catch_warnings():  # the explanation includes their content
        warnings.simplefilter("ignore")
        entry = layers.find(recipe.ways, root)
    return why.compare(recipe, root, entry.folder if entry else None)

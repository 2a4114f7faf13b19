"""Replace an op's code while torch and other threads keep calling it.

All steps that can fail come first: op.py runs again without an effect on its ops, and every binary
is built and opened. So an error does not change the op. torch looks up the fake kernel and the
backward at each call, and storing one function pointer replaces a loaded kernel (see loader.py).
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from opjit import backends, loader, processes, request
from opjit.backends import Backend, targets
from opjit.catalog import registry
from opjit.declare import oplist
from opjit.errors import DeclarationError, NoKernel, OpjitError
from opjit.operators.op import Op
from opjit.operators.registration import redeclare, refuse_second
from opjit.store.entry import Entry
from opjit.store.store import default_store
from opjit.wanted import OpRequest, describe, here

# one reload at a time, so that no two of them wait for each other's ops
_reloading = processes.Lock()


def reload(name: str, device: object = None) -> torch._ops.OpOverload:
    """Rebuild an op if its files changed, for a device and for each device on which it was used.

    Other threads can continue to call the op. After an error, the op does not change. If op.py changed, opjit runs it again, but not the
    modules that it imports. If the schema changed, opjit makes a new torch operator, so use the returned operator instead of the old one.

    Args:
        name: ``"allreduce"`` or ``"namespace::name"``.
        device: ``"cpu"``, ``"cuda"`` or a torch.device. None means the current accelerator, or the CPU.

    Returns:
        The torch operator, like `opjit.get`.

    Raises:
        UnknownOp, DeclarationError, CompileError: see `opjit.errors`. The op does not change.

    Example:
        >>> [scale] = opjit.add_path("my_ops")
        >>> scale = opjit.reload("mylib::scale", "cpu")  # after an edit of scale.c
    """
    try:
        current = registry.find(name)
        refresh(current, [backends.for_device(targets.device_type(device))])
    except OpjitError as error:
        # The frames below do not help a user.
        raise error.with_traceback(None) from error.__cause__
    return current.overload


def refresh(current: Op, extra: Sequence[Backend] = ()) -> None:
    """Update an op from its files for the backends that it was used on and for the given ones.

    If its op.py changed, update all ops of that file.
    """
    with _reloading:
        declaration = current.declaration
        stamp = declaration.stamp_now()
        if stamp == declaration.stamp:
            install([current], current.qualified, extra)
            return
        if stamp is None:
            raise DeclarationError(
                f"{declaration.file}, which declares {current.qualified}, no longer exists; restore it"
            )
        before = registry.of_file(declaration.file)
        newer, module = registry.rerun(current)
        names = {op.qualified for op in newer}
        if current.qualified not in names:
            raise DeclarationError(
                f"{declaration.file} no longer declares {current.qualified}, only {', '.join(sorted(names)) or 'nothing'}"
            )
        install(newer, current.qualified, extra)
        for op in before:
            if op.qualified not in names:
                registry.remove(op)
        for name, value in vars(module).items():  # its functions call the registered ops
            if isinstance(value, Op):
                vars(module)[name] = registry.declared(value.qualified) or value


def install(newer: Sequence[Op], wanted: str = "", extra: Sequence[Backend] = ()) -> list[Op]:
    """Replace declarations by newer ones of the same names, built for the devices in use; for
    `wanted` also for the backends in `extra`.

    Returns the registered ops by name.
    """
    with _reloading, ExitStack() as locks:
        changes = []
        for op in sorted(newer, key=lambda op: op.qualified):
            current = registry.declared(op.qualified)
            if current is not None:
                refuse_second(current, op)
                locks.enter_context(current.lock)
            changes.append(
                (current, op, _binaries(current, op, extra if op.qualified == wanted else ()))
            )
        return [_apply(*change) for change in changes]


def _binaries(current: Op | None, newer: Op, extra: Sequence[Backend]) -> dict[str, Entry | None]:
    """Build and open an op's new binaries, without changing anything.

    The value is None for a backend if the op no longer has a source for it.
    """
    loaded = {} if current is None else current.loaded
    entries = dict[str, Entry | None]()
    for backend in backends.all_backends():
        if backend.name not in loaded and backend not in extra:
            continue
        target = here(backend)
        try:
            store = default_store()
            recipe = describe(newer, target, store)
        except NoKernel:
            if backend in extra:
                raise
            # else the kernel may come from a library, without a source
            if newer.declaration.code is not None:
                entries[backend.name] = None
            continue
        found = OpRequest(recipe, op=newer).find(store, warn=False)
        current_key = loaded[backend.name].key if backend.name in loaded else None
        if found is None or found.key != current_key:
            entry = entries[backend.name] = request.entry(newer, target)
            # The library is opened now, so that `_apply` cannot fail.
            loader.open_library(entry, newer.qualified, newer.declaration.libraries(target))
            oplist.note(newer, target)
    return entries


def _apply(op: Op | None, newer: Op, entries: dict[str, Entry | None]) -> Op:
    """Declare an op again, or for the first time (None), and replace its binaries.

    `newer` is the same declaration if only its sources changed.
    """
    if op is None:
        op = registry.add(newer)
    elif (
        op.schema != newer.schema or op.constant != newer.constant or op.library is None
    ):  # None: an earlier reload was interrupted
        redeclare(op, newer)
    elif op is not newer:
        op.update(newer.declaration)
    for name, entry in entries.items():
        if entry is not None:
            op.replace_kernel(name, entry)
        elif name in op.loaded:
            op.loaded.pop(name).unload()
    return op

"""Newer code in the place of older, while torch and other threads go on calling the op.

Everything that can fail comes first: op.py runs again beside what is there, and every binary that is needed is built and opened.
Only then is anything changed, and of what torch knows nothing is, unless the schema is another one: the fake kernel and the
backward are looked up at each call, and a loaded kernel is left by one store of a function pointer (see loader.py). So whatever
goes wrong leaves the op as it was.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import NamedTuple

import torch

from opjit import api, backends, catalog, loader, targets
from opjit.backends import Backend
from opjit.errors import DeclarationError, NoKernel
from opjit.op import Op
from opjit.registration import redeclare, refuse_second
from opjit.store import Entry, Store, default_root

_reloading = threading.RLock()  # one reload at a time, so that no two of them wait for each other's ops


def _renew_lock() -> None:
    globals()["_reloading"] = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class _Change(NamedTuple):
    """What becomes of one op.

    Attributes:
        known: the op as it is; None where it is new.
        newer: as it was declared now; `known` itself where only its sources can have changed.
        entries: binaries to be called from now on, by backend name.
        dropped: names of backends that it has no source for any more.
    """

    known: Op | None
    newer: Op
    entries: dict[str, Entry]
    dropped: list[str]


def again(name: str, device: object) -> torch._ops.OpOverload:
    """Bring an op up to date for a device and for all that it was used on; see `opjit.get`."""
    known = catalog.find(name)
    refresh(known, [backends.for_device(targets.device_type(device))])
    return known.overload


def refresh(known: Op, extra: Sequence[Backend] = ()) -> None:
    """Bring an op up to date with its files, and all ops of its op.py where that changed.

    Args:
        extra: backends to build for, too, where the op was not used on them yet.
    """
    if known.library is not None:
        raise DeclarationError(f"{known.qualified} was loaded from {known.library}, which never changes; load a newer library with "
                               "opjit.load_library")
    with _reloading:
        stamp = known.stamp_now()
        if stamp == known.stamp:
            put([known], known.qualified, extra)
            return
        if stamp is None:
            raise DeclarationError(f"{known.file}, which declares {known.qualified}, is not there any more")
        before = [op for op in catalog.all_ops() if op.file == known.file]
        newer, module = catalog.read_again(known)
        names = {op.qualified for op in newer}
        if known.qualified not in names:
            raise DeclarationError(f"{known.file} does not declare {known.qualified} any more, but {', '.join(sorted(names)) or 'nothing'}")
        put(newer, known.qualified, extra)
        for gone in (op for op in before if op.qualified not in names):
            catalog.remove(gone)
        _replace_module(module)


def put(newer: Sequence[Op], wanted: str = "", extra: Sequence[Backend] = ()) -> None:
    """Put declarations in the place of those of the same names, with binaries for every device that they were used on.

    Args:
        wanted, extra: name of an op, and backends to build it for, too.
    """
    with _reloading, ExitStack() as locks:
        changes = []
        for op in sorted(newer, key=lambda op: op.qualified):
            known = catalog.declared(op.qualified)
            if known is not None:
                refuse_second(known, op)
                locks.enter_context(known.lock)
            changes.append(_plan(known, op, extra if op.qualified == wanted else ()))
        for change in changes:
            _apply(change)


def _plan(known: Op | None, newer: Op, extra: Sequence[Backend]) -> _Change:
    """Build and open what the op needs; nothing is changed."""
    used = {backend.name: backend for backend in backends.all_backends() if known is not None and backend.name in known.loaded}
    entries, dropped, store = {}, [], Store(default_root())
    for backend in {**used, **{backend.name: backend for backend in extra}}.values():
        target = targets.here(backend)
        try:
            recipe = api.describe(newer, target, store)
        except NoKernel:
            if backend in extra:
                raise
            if newer.code is not None:  # else the kernel may be a library that was loaded without its source
                dropped.append(backend.name)
            continue
        if known is None or backend.name not in known.loaded or recipe.key != known.loaded[backend.name].key:
            entries[backend.name], _ = api.using(newer, target, loader.open_library)
            api.note(newer, target)
    return _Change(known, newer, entries, dropped)


def _apply(change: _Change) -> None:
    op, newer = change.known, change.newer
    if op is None:
        op = catalog.add(newer)
    elif op.schema != newer.schema:
        redeclare(op, newer)
    elif op is not newer:
        op.adopt(newer)
    for name in change.dropped:
        if name in op.loaded:
            loader.unload(op.loaded.pop(name))
    for name, entry in change.entries.items():
        if name in op.loaded:
            loader.replace(op.loaded[name], entry, op.qualified)
        else:
            op.loaded[name] = loader.load(entry, op.qualified)


def _replace_module(module: ModuleType) -> None:
    """Let whoever imported an op.py find what it defines now; an op is the same object for as long as it has its name."""
    for name, value in vars(module).items():
        if isinstance(value, Op):
            vars(module)[name] = catalog.declared(value.qualified) or value
    imported = sys.modules.get(module.__name__)
    if imported is not None and getattr(imported, "__file__", None) == module.__file__:
        vars(imported).update({name: value for name, value in vars(module).items() if not name.startswith("__")})

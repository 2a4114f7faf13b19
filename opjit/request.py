"""The main path: from an op to a kernel that torch calls.

    ready -> _load_kernel -> entry -> lookup          a layer or the store has the binary: verify it, open it, register its kernel
                                   -> fetch_or_build  else: lock, look again, fetch or build, publish

C++ extensions (opjit.cpp_extension) and shared libraries (opjit.shared_library) also use `lookup`
and `fetch_or_build`. Importing this module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from opjit import files, processes, progress
from opjit.backends import Backend
from opjit.backends.targets import Target
from opjit.environment import is_on
from opjit.errors import CompileError, LoadError, NotCached
from opjit.store import usage
from opjit.store.entry import Entry
from opjit.store.store import Store, default_store
from opjit.wanted import BinaryRequest, W, here, of_op

if TYPE_CHECKING:
    from opjit import loader
    from opjit.declare.op_state import OpState

_Result = TypeVar("_Result")


def ready(op: OpState, backend: Backend, found: Entry | None = None) -> None:
    """Make torch call the op's C kernel on the backend's device. `found` is its entry, if the caller has one."""
    if backend.name in op.loaded:
        return
    with op.lock:
        if backend.name not in op.loaded:
            target = here(backend)
            op.install_kernel(backend, _load_kernel(op, target, found))
            if os.environ.get("OPJIT_RECORD"):
                from opjit.declare import oplist

                oplist.note(op, op.declaration.target(target))


def ready_for_call(op: OpState, backend: Backend) -> None:
    """`ready`, for a call of the op: a build that failed is not tried again while nothing has changed. `opjit.get` does try again."""
    failed = op.failed.get(backend.name)
    if failed is not None:
        name, error = failed
        wanted = of_op(op, here(backend), default_store())
        if name == wanted.name and error.read and not any(wanted.inputs.changes(error.read)):
            raise CompileError(
                f"{error}\nNo input has changed since this build failed, so it was not tried "
                f"again; to try again, call opjit.get({op.qualified!r}, {backend.name!r})",
                op=error.op,
                target=error.target,
                command=error.command,
                log=error.log,
            )
    ready(op, backend)


def _load_kernel(op: OpState, target: Target, found: Entry | None) -> loader.Loaded:
    from opjit import loader

    def load(chosen: Entry) -> loader.Loaded:
        return loader.load(chosen, op.qualified, op.declaration.libraries(target))

    return use_entry(partial(entry, op, target), load, found)


def use_entry(
    find: Callable[[Store], Entry], use: Callable[[Entry], _Result], found: Entry | None = None
) -> _Result:
    """Find or build an entry, unless the caller has `found` it, and use it.

    Another process may remove it before that: then it is found or built again, in the cache, and at last in a private folder.
    """
    from opjit import loader

    for place in (default_store, default_store, lambda: Store(files.temporary_folder())):
        chosen = found or find(place())
        try:
            return use(chosen)
        except (OSError, ImportError, LoadError) as error:
            if chosen.library.exists() and not isinstance(error, loader.Gone):
                raise
            gone = error
            found = None
    raise gone


def entry(op: OpState, target: Target, store: Store | None = None) -> Entry:
    """Return an op's verified entry for a target, from a layer, the store, the remote or the compiler.

    If the backend has a method `entry`, that method makes it: for example, the binaries of the
    emulated device are not cached.
    """
    own = getattr(target.backend, "entry", None)
    if own is not None:
        return cast("Entry", own(op, target))
    store = store or default_store()
    return obtain(of_op(op, target, store), store)


def obtain(wanted: BinaryRequest, store: Store) -> Entry:
    """Return the verified entry of a request, from a layer, the store, the remote or the compiler."""
    return lookup(wanted, store) or fetch_or_build(wanted, store)


def lookup(wanted: BinaryRequest, store: Store, warn: bool = True) -> Entry | None:
    """Return the verified entry from a layer or the store, or None. `warn` about a damaged one, but not at a request's second look."""
    found = wanted.find(store, warn)
    if found is not None:
        usage.count(store.base, "hits")
        progress.log(f"{wanted} is built already: {found.folder}")
    return found


def fetch_or_build(wanted: W, store: Store) -> Entry:
    """Fetch or build an entry.

    One process per key does so, and the other processes wait and look again.
    """
    offline = is_on("OPJIT_OFFLINE")
    if offline or progress.is_logged():
        from opjit import why

        missing = why.compare(wanted.inputs, store)
        progress.log(missing.reason)
    if offline:
        unusable = f"; {missing.reason}" if missing.unusable and not missing.differences else ""
        raise NotCached(
            f"{wanted} is not cached, and OPJIT_OFFLINE forbids building or downloading it; run `opjit precompile` "
            f"without OPJIT_OFFLINE, or unset OPJIT_OFFLINE{unusable}",
            op=wanted.inputs.name,
            target=wanted.inputs.purpose,
        )
    with processes.without_collections():
        return _build_locked(wanted, store)


def _build_locked(wanted: W, store: Store) -> Entry:
    with processes.importing:
        from opjit import lock

    with (
        processes.starting_threads(),
        progress.status(f"building {wanted}") as say,
        lock.held(wanted.name, lambda holder: say(f"waiting for {wanted}: {holder}")),
    ):
        wanted = wanted.now(store)  # the sources may have changed during the wait
        found = lookup(wanted, store, warn=False) or wanted.fetch(store)
        if found is None and wanted.by_torch:
            import_builder()
        return found or wanted.build(store)


def import_builder() -> None:
    """Import the modules of a build by torch's builder while other threads' forks wait."""
    with processes.importing:
        from opjit.builder import build, torch_builder  # noqa: F401

        torch_builder.private_copy()

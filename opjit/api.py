"""The main path: from an op's name to a kernel that torch calls."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from opjit import backends, catalog, counters, forks, layers, loader, targets, toolchain
from opjit.backends import Backend, Flags
from opjit.errors import CompileError, DeviceUnavailable, ToolMissing
from opjit.headers import Scan
from opjit.op import Op
from opjit.recipe import Recipe, read_inputs
from opjit.store import Entry, Store, default_root
from opjit.targets import Target

T = TypeVar("T")
_got: dict[tuple[str, object], torch._ops.OpOverload] = {}
_logger = logging.getLogger("opjit")


def get(name: str, device: object = None, *, reload: bool = False) -> torch._ops.OpOverload:
    """Ready an op for a device, building it if no cache has it, and return it.

    Args:
        name: ``"allreduce"`` or ``"namespace::name"``.
        device: ``"cpu"``, ``"cuda"``, a torch.device; None is the current accelerator, else the CPU.
        reload: look at the op's files again, and build what changed, for every device that the op was used on. Torch and other
            threads may go on calling it; an error leaves it as it was. Only a changed schema makes it another op for torch: then
            get its overload anew. An op.py that changed is run again; the modules that it imports are not.

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
        from opjit.reload import again

        return again(name, device)
    try:
        return _got[name, device]
    except (KeyError, TypeError):  # TypeError: a device that cannot be hashed is looked at, and refused, below
        known = _got  # another thread may declare the op anew meanwhile
        op = catalog.find(name)
        ready(op, backends.for_device(targets.device_type(device)))
        return known.setdefault((name, device), op.overload)


def forget_got() -> None:
    """Look every op up anew: one of them was declared again."""
    global _got
    _got = {}


def wanted(device: object, arch: str | None) -> Target:
    """The target of a build that a user asks for: an arch by its name, else this machine's devices of a kind."""
    backend = backends.for_device(targets.device_type(device)) if device is not None or arch is None else None
    if arch is None:
        assert backend is not None
        return targets.here(backend)
    target = targets.named(arch, backend)
    if target.backend.uses_nvcc:
        nvcc = toolchain.find_nvcc(Store(default_root()).notes)
        target = targets.named(arch, target.backend, nvcc.version if nvcc else None)
    return target


def ready(op: Op, backend: Backend, found: Entry | None = None) -> None:
    """Make torch call the op's C kernel on the backend's device, out of an entry that was found already or a look for one."""
    if backend.name in op.loaded:
        return
    with op.lock:
        if backend.name not in op.loaded:
            target = targets.here(backend)
            op.loaded[backend.name] = using(op, target, loader.load, found)[1]
            note(op, target)


def note(op: Op, target: Target) -> None:
    """Where `opjit record` runs this process: an op is in use for a target."""
    path = os.environ.get("OPJIT_RECORD")
    if path:
        with forks.importing():
            from opjit import record

        record.note(op, target, path)


def using(op: Op, target: Target, use: Callable[[Entry, str], T], found: Entry | None = None) -> tuple[Entry, T]:
    """The binary of an op for a target, `found` or looked for, and what a function of `loader` makes of it."""
    return loader.found(lambda store: entry(op, target, store), lambda binary: use(binary, op.qualified), found)


def entry(op: Op, target: Target, store: Store | None = None) -> Entry:
    """The verified binary of an op for a target: from a layer, from the store, fetched or built into that."""
    store, started = store or Store(default_root()), time.perf_counter()
    recipe = describe(op, target, store)
    found = layers.find(recipe)
    where = "layer" if found else "store"
    found = found or store.find(recipe)
    if found is None:
        return build_once(op, recipe, store)
    counters.hit(where, store.base, found.seconds, started)
    if followed():
        with forks.importing():
            from opjit import progress

        progress.say(f"{op.qualified} for {target} is built already: {found.folder}")
    return found


def followed() -> bool:
    """Whether somebody may want to read of a hit; asked at each one, so it costs a microsecond."""
    return "OPJIT_VERBOSE" in os.environ or _logger.isEnabledFor(logging.INFO)


def describe(op: Op, target: Target, store: Store) -> Recipe:
    """What the op is built from for a target, now."""
    return recipe_of(op, target, compilers(target.backend, store))


def recipe_of(op: Op, target: Target, compilers: dict[str, str] | None, scan: Scan | None = None) -> Recipe:
    """The same for whom knows the compilers already; `scan` is what the scans of other ops found out at this moment."""
    source, flags = op.source(target.backend), flags_of(op, target)
    return Recipe(op.schema, target, source, read_inputs(source, target, flags.include, scan), flags, compilers)


def flags_of(op: Op, target: Target) -> Flags:
    """The backend's flags with the op's own."""
    flags = target.backend.flags(target.arch, target.runtime)
    if op.extra is None:
        return flags
    from opjit import extras

    return extras.join(flags, op.extra)


def compilers(backend: Backend, store: Store) -> dict[str, str] | None:
    """Who would compile; None where somebody is missing or does not work, and then anybody's binary will do."""
    try:
        nvcc = toolchain.find_nvcc(store.notes) if backend.uses_nvcc else None
        compiler = toolchain.find_compiler(store.notes)
    except ToolMissing:
        return None
    return None if compiler is None or (backend.uses_nvcc and nvcc is None) else toolchain.identity(compiler, nvcc)


def build_once(op: Op, recipe: Recipe, store: Store, make: Callable[[Recipe, Store], Entry] | None = None) -> Entry:
    """Fetch or build under the key's lock; whoever waited for the lock finds what its holder got.

    Args:
        make: builds and publishes it; None is `build.build`.
    """
    with forks.importing():
        from opjit import build, lock, progress
        from opjit.environment import is_on

    what = f"{op.qualified} for {recipe.target}"
    if progress.heard():
        from opjit import why

        progress.say(why.miss(recipe, store).reason)
    if is_on("OPJIT_OFFLINE"):
        raise DeviceUnavailable(f"{what} is in no cache, and OPJIT_OFFLINE forbids to build it or to ask a remote")
    name = recipe.key or op.qualified.replace("::", ".")
    with (build.without_collection(), progress.shown(f"building {what}") as say,
          lock.held(name, lambda holder: say(f"waiting for {op.qualified}: {holder}"))):
        recipe = describe(op, recipe.target, store)  # as the sources are now, after the wait
        try:
            return _elsewhere(recipe, store) or progress.timed(what, lambda: (make or build.build)(recipe, store))
        except CompileError as error:
            if op.code is not None:  # the compiler saw a file that nobody knows
                error.args = (str(error).replace(str(recipe.source), op.code.shown or recipe.source.name),)
            raise


def _elsewhere(recipe: Recipe, store: Store) -> Entry | None:
    """What somebody has built meanwhile, or the remote has."""
    from opjit import progress

    started, where, how = time.perf_counter(), "store", "was built meanwhile"
    found = store.find(recipe, quiet=True)
    if found is None and os.environ.get("OPJIT_REMOTE"):
        from opjit import remote

        found, where, how = remote.fetch(recipe, store), "remote", "came from the remote"
    if found is None:
        counters.miss(store.base)
    else:
        counters.hit(where, store.base, found.seconds, started)
        progress.say(f"{recipe.schema.qualified} for {recipe.target} {how}: {found.folder}")
    return found

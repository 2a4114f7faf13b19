"""The main path: from an op's name to a kernel that torch calls."""

from __future__ import annotations

import logging
import os

import torch

from opjit import backends, catalog, loader, targets, toolchain
from opjit.backends import Backend, Flags
from opjit.errors import CompileError, DeviceUnavailable, ToolMissing
from opjit.op import Op
from opjit.recipe import Recipe, read_inputs
from opjit.store import Entry, Store, default_root, find_in_layers
from opjit.targets import Target

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
        op = catalog.find(name)
        ready(op, backends.for_device(targets.device_type(device)))
        return _got.setdefault((name, device), op.overload)


def forget_got() -> None:
    """Look every op up anew: one of them was declared again."""
    _got.clear()


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


def ready(op: Op, backend: Backend) -> None:
    """Make torch call the op's C kernel on the backend's device."""
    if backend.name in op.loaded:
        return
    with op.lock:
        if backend.name not in op.loaded:
            op.loaded[backend.name] = loader.load(entry(op, targets.here(backend)), op.qualified)


def entry(op: Op, target: Target) -> Entry:
    """The verified binary of an op for a target: from a layer, from the store, fetched or built into that."""
    store = Store(default_root())
    recipe = describe(op, target, store)
    found = find_in_layers(recipe) or store.find(recipe)
    if found is None:
        return _build_once(op, recipe, store)
    if followed():
        from opjit import progress

        progress.say(f"{op.qualified} for {target} is built already: {found.folder}")
    return found


def followed() -> bool:
    """Whether somebody may want to read of a hit; asked at each one, so it costs a microsecond."""
    return "OPJIT_VERBOSE" in os.environ or _logger.isEnabledFor(logging.INFO)


def describe(op: Op, target: Target, store: Store) -> Recipe:
    """What the op is built from for a target, now."""
    source, backend, flags = op.source(target.backend), target.backend, flags_of(op, target)
    return Recipe(op.schema, target, source, read_inputs(source, target, flags.include), flags, _toolchain(backend, store))


def flags_of(op: Op, target: Target) -> Flags:
    """The backend's flags with the op's own."""
    flags = target.backend.flags(target.arch, target.runtime)
    if op.extra is None:
        return flags
    from opjit import extras

    return extras.join(flags, op.extra)


def _toolchain(backend: Backend, store: Store) -> dict[str, str] | None:
    """Who would compile; None where somebody is missing or does not work, and then anybody's binary will do."""
    try:
        compiler = toolchain.find_compiler(store.notes)
        nvcc = toolchain.find_nvcc(store.notes) if compiler is not None and backend.uses_nvcc else None
    except ToolMissing:
        return None
    return None if compiler is None or (backend.uses_nvcc and nvcc is None) else toolchain.identity(compiler, nvcc)


def _build_once(op: Op, recipe: Recipe, store: Store) -> Entry:
    """Fetch or build under the key's lock; whoever waited for the lock finds what its holder got."""
    from opjit import build, lock, progress
    from opjit.environment import is_on

    target = recipe.target
    if progress.heard():
        from opjit import why

        progress.say(why.miss(recipe, store).reason)
    if is_on("OPJIT_OFFLINE"):
        raise DeviceUnavailable(f"{op.qualified} for {target} is in no cache, and OPJIT_OFFLINE forbids to build it or to ask a remote")
    name = recipe.key or op.qualified.replace("::", ".")
    with (build.without_collection(), progress.shown(f"building {op.qualified} for {target}") as say,
          lock.held(name, lambda holder: say(f"waiting for {op.qualified}: {holder}"))):
        recipe = describe(op, target, store)  # as the sources are now, after the wait
        try:
            found = store.find(recipe, quiet=True)
            if found is not None:
                progress.say(f"{op.qualified} for {target} was built meanwhile: {found.folder}")
            return found or _fetch(recipe, store) or progress.timed(f"{op.qualified} for {target}", lambda: build.build(recipe, store))
        except CompileError as error:
            if op.code is not None:  # the compiler saw a file that nobody knows
                error.args = (str(error).replace(str(recipe.source), op.code.shown or recipe.source.name),)
            raise


def _fetch(recipe: Recipe, store: Store) -> Entry | None:
    """The entry from the remote, where there is one."""
    if not os.environ.get("OPJIT_REMOTE"):
        return None
    from opjit import progress, remote

    found = remote.fetch(recipe, store)
    if found is not None:
        progress.say(f"{recipe.schema.qualified} for {recipe.target} came from the remote: {found.folder}")
    return found

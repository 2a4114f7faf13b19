"""Libraries outside the cache: built into a folder of the user's choice, and loaded from there, perhaps by another process.

    DIR/<namespace>.<op>.<arch>.<start of the key>/    the library, manifest.json, the glue's source, the build's commands

The folder is a cache entry's copy and follows the same rules: it appears complete by one rename, what is in it never changes, and
a change of the op makes another folder. So no build ever writes to a file that a process may have mapped.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from opjit import api, backends, catalog, loader, manifest, store
from opjit.errors import BuildError, DeclarationError, DeviceUnavailable, EntryError, LoadError, OpjitError
from opjit.manifest import Manifest
from opjit.op import Op
from opjit.schema import Schema, parse
from opjit.store import Entry
from opjit.targets import Target

_declaring = threading.Lock()  # one declaration from a manifest at a time


def _renew_lock() -> None:
    """A forked child has no thread that could free it."""
    globals()["_declaring"] = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def build_library(name: str, build_directory: str | os.PathLike[str], device: object = None, arch: str | None = None) -> Path:
    """Build an op, or take it from the cache, and leave it in a folder; nothing is loaded.

    Args:
        name: ``"allreduce"`` or ``"namespace::name"``.
        build_directory: made if it is not there. The library lies in a folder of its own in it, with its manifest; that folder
            can be copied elsewhere as a whole. Nothing in it is ever overwritten: another build of the op goes beside it.
        device: build for this machine's devices of that kind; None is the current accelerator, else the CPU.
        arch: build for this arch (``"sm_90"``, ``"x86-64-v3"``) instead, whatever this machine has.

    Returns:
        The path of the ``.so``, for `opjit.load_library`.

    Raises:
        UnknownOp, UnknownDevice, UnknownArch, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`.
        BuildError: the folder cannot be written.

    Example:
        >>> opjit.build_library("allreduce", "build", "cpu")
        PosixPath('build/opjit.allreduce.x86-64-v3.53493f8da53c658857ae/opjit.allreduce.so')
    """
    op = catalog.find(name)
    target = api.wanted(device, arch)
    entry = api.entry(op, target)
    try:
        return store.copy(entry, target, op.qualified, Path(build_directory)).library
    except (OSError, EntryError) as error:
        raise BuildError(f"{op.qualified} for {target} cannot be left in {os.fspath(build_directory)!r}: {error}; choose a folder that you "
                         "can write", op=op.qualified, target=str(target)) from error


def load_library(path: str | os.PathLike[str]) -> torch._ops.OpOverload:
    """Load a library that `opjit.build_library` left, as its op's kernel, and return the op. Nothing is compiled.

    The library is held against the manifest beside it, and both against this machine, before it is opened. Where this process
    declares the op, the schemas must be the same, and the library takes the place of a kernel that was loaded before. Where it
    does not, the op is declared from the manifest: it runs, but has no backward and no fake kernel, so torch.compile cannot trace it.

    Args:
        path: of the ``.so``.

    Raises:
        LoadError: there is no such library, it is not what its manifest says, it may not be trusted, or it was not built for this
            machine; or the dynamic loader or torch refused it.
        DeviceUnavailable: it is for a kind of device that is not here.
        DeclarationError: the op is declared here with another schema.

    Example:
        >>> allreduce = opjit.load_library("build/opjit.allreduce.x86-64-v3.53493f8da53c658857ae/opjit.allreduce.so")
        >>> allreduce(torch.ones(3))
        tensor(3.)
    """
    place = Path(os.path.realpath(path))
    described, content = _read(place, path)
    try:
        schema, target = origin(described)
        store.check_library(content, target, described.link)
    except OpjitError as error:
        raise LoadError(f"{place} is not loaded: {error}") from error
    _refuse_elsewhere(place, schema, target)
    op = _declared(schema, place)
    entry = Entry(place.parent, described.key, place)
    with op.lock:
        loaded = op.loaded.get(target.backend.name)
        if loaded is None:
            op.loaded[target.backend.name] = loader.load(entry, op.qualified)
        else:
            loader.replace(loaded, entry, op.qualified)
    return op.overload


def _read(place: Path, asked: str | os.PathLike[str]) -> tuple[Manifest, bytes]:
    """The manifest and the bytes of a library, verified as far as the two of them go."""
    try:
        if not place.is_file():
            raise LoadError(f"there is no library {os.fspath(asked)!r}: expected the path that opjit.build_library returned")
        described, content = store.read(place.parent)
        if described.library != place.name:
            raise EntryError(f"the manifest beside it is that of {described.library}")
    except FileNotFoundError:
        raise LoadError(f"{place} is not loaded: it has no {manifest.NAME} beside it; opjit loads what opjit.build_library leaves, so copy "
                        "its folder as a whole") from None
    except (OSError, EntryError) as error:
        raise LoadError(f"{place} is not loaded: {error}; build it again with opjit.build_library") from error
    return described, content


def origin(described: Manifest) -> tuple[Schema, Target]:
    """The op and the target that a manifest speaks of.

    Raises:
        EntryError: it speaks of none that this process knows.
        SchemaError: its schema is none.
    """
    texts = [described.document.get(name) for name in ("schema", "backend", "dispatch_key", "arch", "runtime")]
    if not all(isinstance(text, str) for text in texts):
        raise EntryError("its manifest names no op and target")
    schema, name, dispatch_key, arch, runtime = map(str, texts)
    backend = next((known for known in backends.all_backends() if known.name == name), None)
    if backend is None or backend.dispatch_key != dispatch_key:
        raise EntryError(f"it was built for the backend {name!r} ({dispatch_key}), which this process does not have; add it with "
                         "opjit.register_backend")
    if not backend.takes(arch):
        raise EntryError(f"its manifest names the arch {arch!r}, which is none of {name}'s")
    return parse(schema), Target(backend, arch, runtime)


def _refuse_elsewhere(place: Path, schema: Schema, target: Target) -> None:
    """A library runs where its target does."""
    missing = target.backend.available()
    if missing:
        raise DeviceUnavailable(f"{place} is not loaded: {missing}")
    here = Target(target.backend, target.backend.host_arch(), target.backend.runtime(None))
    if not target.backend.runs(target.arch) or target.runtime != here.runtime:
        raise LoadError(f"{place} is not loaded: it was built for {target}, and this process runs {here}; build it for that: "
                        f"opjit.build_library({schema.qualified!r}, DIR, arch={here.arch!r})")


def _declared(schema: Schema, place: Path) -> Op:
    """The op of a library: as this process declares it, else as the library's manifest does."""
    with _declaring:
        known = catalog.declared(schema.qualified)
        if known is None:
            return catalog.add(Op(schema.text, _no_fake(schema, place), place.parent, library=place))
    if known.schema.text != schema.text:
        raise DeclarationError(f"{place} is not loaded: it was built for {schema.text!r}, and this process declares {known.schema.text!r} "
                               f"(in {known.folder}); build the library again from that declaration, or import the one it was built from")
    return known


def _no_fake(schema: Schema, place: Path) -> Any:
    def fake(*args: Any, **kwargs: Any) -> None:
        if schema.results:
            raise DeclarationError(f"{schema.qualified} is known from {place} only, which holds no fake kernel, so it cannot be traced or "
                                   "called with meta tensors; import the module that declares it before opjit.load_library")

    return fake

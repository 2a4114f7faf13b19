"""Libraries outside the cache, in a folder of the user's choice; another process can load them.

    DIR/<namespace>.<op>.<arch>.<start of the key>/    the library, manifest.json, the glue's source, the build's commands

The folder is a copy of a cache entry, and as immutable: it appears complete by one rename, and a changed op gets another folder. So no
build ever writes to a file that a process may have mapped.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from opjit import backends, loader, processes, request
from opjit.backends.targets import Target
from opjit.declare import catalog
from opjit.declare.op import Op, no_fake
from opjit.errors import BuildError, DeclarationError, DeviceUnavailable, EntryError, LoadError, OpjitError
from opjit.recipe.schema import Schema, parse
from opjit.store import manifest, store
from opjit.store.entry import Entry, check_library, read
from opjit.store.manifest import Manifest
from opjit.wanted import target_of


def build_library(name: str, build_directory: str | os.PathLike[str], device: object = None, arch: str | None = None) -> Path:
    """Build an op, or take it from the cache, and copy it to a folder. Loads nothing.

    Args:
        name: ``"allreduce"`` or ``"namespace::name"``.
        build_directory: created if missing. The library and its manifest get a folder of their own in it, which can be copied as a
            whole. Nothing is ever overwritten: another build of the op gets another folder.
        device: build for this machine's device of that kind; None means the current accelerator, else the CPU.
        arch: build for this arch (``"sm_90"``, ``"x86-64-v3"``) instead, which this machine need not have.

    Returns:
        The path of the ``.so``, for `opjit.load_library`.

    Raises:
        UnknownOp, UnknownDevice, UnknownArch, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`.
        BuildError: the folder is not writable.

    Example:
        >>> opjit.build_library("allreduce", "build", "cpu")
        PosixPath('build/opjit.allreduce.x86-64-v3.53493f8da53c658857ae/opjit.allreduce.so')
    """
    op = catalog.find(name)
    target = target_of(device, arch)
    entry = request.entry(op, target)
    try:
        return store.copy(entry, target, op.qualified, Path(build_directory)).library
    except (OSError, EntryError) as error:
        raise BuildError(f"{op.qualified} for {target} cannot be copied to {os.fspath(build_directory)!r}: {error}; choose a folder that "
                         "you can write", op=op.qualified, target=str(target)) from error


def load_library(path: str | os.PathLike[str]) -> torch._ops.OpOverload:
    """Load a library from `opjit.build_library` as its op's kernel, and return the op. Compiles nothing.

    The library is verified with the manifest beside it, and for this machine, before it is opened. If this process declares the op, the
    schemas must be equal, and the library replaces a kernel that is loaded already. Otherwise the op is declared from the manifest: it
    runs, but without a backward and a fake kernel, so torch.compile cannot trace it.

    Args:
        path: of the ``.so``.

    Raises:
        LoadError: the library is missing, damaged, not trusted or not for this machine; or the dynamic loader or torch rejected it.
        DeviceUnavailable: there is no device of that kind.
        DeclarationError: the op is declared with another schema.

    Example:
        >>> allreduce = opjit.load_library("build/opjit.allreduce.x86-64-v3.53493f8da53c658857ae/opjit.allreduce.so")
        >>> allreduce(torch.ones(3))
        tensor(3.)
    """
    place = Path(os.path.realpath(path))
    described, content = _read(place, path)
    try:
        schema, target = origin(described)
        check_library(content, target, described.link)
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
            loaded.replace(entry, op.qualified)
    return op.overload


def _read(place: Path, asked: str | os.PathLike[str]) -> tuple[Manifest, bytes]:
    """Return a library's manifest and bytes, after comparing them."""
    try:
        if not place.is_file():
            raise LoadError(f"there is no library {os.fspath(asked)!r}: expected the path that opjit.build_library returned")
        described, content = read(place.parent)
        if described.library != place.name:
            raise EntryError(f"the manifest beside it belongs to {described.library}")
    except FileNotFoundError:
        raise LoadError(f"{place} is not loaded: there is no {manifest.NAME} beside it; copy the folder from opjit.build_library as a "
                        "whole") from None
    except (OSError, EntryError) as error:
        raise LoadError(f"{place} is not loaded: {error}; build it again with opjit.build_library") from error
    return described, content


def origin(described: Manifest) -> tuple[Schema, Target]:
    """Return the op and the target of a manifest.

    Raises:
        EntryError: it names none that this process knows.
        SchemaError: its schema is invalid.
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
        raise EntryError(f"its manifest names the arch {arch!r}, which is not one of {name}'s")
    return parse(schema), Target(backend, arch, runtime)


def _refuse_elsewhere(place: Path, schema: Schema, target: Target) -> None:
    """Raise an error unless this process can run the target's binaries."""
    missing = target.backend.available()
    if missing:
        raise DeviceUnavailable(f"{place} is not loaded: {missing}")
    here = Target(target.backend, target.backend.host_arch(), target.backend.runtime(None))
    if not target.backend.runs(target.arch) or target.runtime != here.runtime:
        raise LoadError(f"{place} is not loaded: it was built for {target}, but this process runs {here}; build it for that: "
                        f"opjit.build_library({schema.qualified!r}, DIR, arch={here.arch!r})")


def _declared(schema: Schema, place: Path) -> Op:
    """The op of a library: as this process declares it, else as the library's manifest does."""
    with processes.declaring:
        known = catalog.declared(schema.qualified)
        if known is None:
            fake = no_fake(schema, f"it is known from {place} only; import the module that declares it before opjit.load_library")
            return catalog.add(Op(schema.text, fake, place.parent, library=place))
    if known.schema.text != schema.text:
        raise DeclarationError(f"{place} is not loaded: it was built for {schema.text!r}, but this process declares {known.schema.text!r} "
                               f"(in {known.folder}); build the library again, or import the declaration that it was built from")
    return known

"""`opjit.load_library`: the ops of a library's folder, verified, declared and registered."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opjit import backends, files, processes
from opjit.backends.targets import Target
from opjit.catalog import registry
from opjit.errors import DeclarationError, DeviceUnavailable, EntryError, LoadError, OpjitError
from opjit.files import StrPath
from opjit.library.standalone import rank
from opjit.operators.op import Op
from opjit.recipe.schema import Schema, parse
from opjit.store import elf, layers
from opjit.store import manifest as manifests
from opjit.store.entry import Entry, check_library, read
from opjit.store.manifest import Manifest
from opjit.store.store import VERSION


def load_library(path: StrPath) -> Any:
    """Load an op package from `opjit.build_library`, without a compiler.

    The op.py files of the package declare its ops, and the binaries become their kernels. Therefore meta tensors, torch.compile and
    autograd work. If an op was declared without an op.py, the package contains only its schema. The op then runs, but without a
    backward and a fake kernel.

    opjit checks every file before it runs or opens it: other users must not be able to write it, and each binary must match its
    manifest and be for this machine. If this process already declares an op, the schemas must be equal. The declaration stays, and
    the library replaces a loaded kernel.

    Args:
        path: the path of an op's ``.so``, which loads all ops of its op.py, or the path of the op
            package.

    Returns:
        For a ``.so``, its op, which is a torch operator. For an op package, the list of its ops,
        sorted by name.

    Raises:
        LoadError: the library is missing, damaged, not trusted or not for this machine; its op.py raised an error; or the dynamic
            loader or torch rejected it.
        DeviceUnavailable: this machine does not have a device of that kind.
        DeclarationError: an op is declared with another schema, or elsewhere.

    Example:
        >>> library = opjit.build_library(["allreduce", "mylib::scale"], "build", "cpu", name="my_ops")
        >>> scale, allreduce = opjit.load_library(library)  # also in another process
        >>> allreduce(torch.ones(3))
        tensor(3.)
        >>> opjit.load_library("build/my_ops/mylib.scale.so") is scale
        True
    """
    place = Path(os.path.realpath(path))
    shown = Path(os.path.abspath(path))
    if place.is_file() and place.suffix == ".so" and place.with_suffix("").is_dir():
        place = place.with_suffix("")  # the folder next to the library for plain torch
    try:
        _refuse_swappable(shown, shown)
        found = {
            folder: [
                _verified(shown, each.parent)
                for each in sorted(
                    (folder / layers.FOLDER).glob(f"{VERSION}/*/*/*/{manifests.NAME}")
                )
            ]
            for folder in _folders(place, shown, path)
        }
    except (OSError, EntryError) as error:
        raise LoadError(
            f"{shown} is not loaded: {error}; build it again with opjit.build_library"
        ) from error
    usable = {folder: _usable(shown, place, binaries) for folder, binaries in found.items()}
    with processes.reading:
        ops = [
            (_declared(shown, folder, schema), entry, target)
            for folder, binaries in usable.items()
            for entry, schema, target in binaries
        ]
    for op, entry, target in ops:
        with op.lock:
            op.replace_kernel(target.backend.name, entry, op.declaration.libraries(target))
    if place.is_file():
        named = next(
            schema for entry, schema, _ in found[place.parents[5]] if entry.library == place
        )
        return next(op.overload for op, *_ in ops if op.qualified == named.qualified)
    return [op.overload for op in sorted({op for op, *_ in ops}, key=lambda op: op.qualified)]


def _folders(place: Path, shown: Path, path: StrPath) -> list[Path]:
    """Return the op folders of a library: all, or the one of a ``.so``."""
    if place.is_dir():
        folders = [each for each in registry.op_folders(place) if (each / layers.FOLDER).is_dir()]
        if folders:
            return folders
    elif layers.holds(place):
        folder = place.parents[5]
        if (folder / "op.py").is_file():
            return [folder]
        raise EntryError(f"there is no {folder / 'op.py'}")
    elif place.is_file():
        raise LoadError(
            f"{shown} is not loaded: the rest of its op package is missing; copy the directory from opjit.build_library as a "
            "whole, and load it from there"
        )
    raise LoadError(
        f"there is no library {os.fspath(path)!r}: expected a path that opjit.build_library returned"
    )


def _refuse_swappable(shown: Path, path: Path) -> None:
    problem = files.replacement_risk(path)
    if problem is not None:
        raise LoadError(f"{shown} is not loaded: {problem}")


def _verified(shown: Path, folder: Path) -> tuple[Entry, Schema, Target]:
    """Verify one op's entry."""
    _refuse_swappable(shown, folder)
    manifest, content, identity = read(folder)
    if manifest.key != folder.name:
        raise EntryError(f"the manifest in {folder} belongs to another build")
    try:
        schema, target = origin(manifest)
        check_library(content, target, manifest.link)
    except OpjitError as error:
        raise LoadError(f"{shown} is not loaded: {error}") from error
    return Entry(folder, manifest.key, folder / manifest.library, verified=identity), schema, target


def origin(manifest: Manifest) -> tuple[Schema, Target]:
    """Return the op and the target of a manifest.

    Raises SchemaError, or EntryError if this process cannot identify them.
    """
    texts = [
        manifest.document.get(name)
        for name in ("schema", "backend", "dispatch_key", "arch", "runtime", "host")
    ]
    if not all(isinstance(text, str) for text in texts):
        raise EntryError("its manifest does not name an op and a target")
    schema, name, dispatch_key, arch, runtime, host = map(str, texts)
    backend = backends.by_name(name)
    if backend is None or backend.dispatch_key != dispatch_key:
        raise EntryError(
            f"it was built for the backend {name!r} ({dispatch_key}), which this process does not have; add it with "
            "opjit.register_backend"
        )
    if not backend.takes(arch):
        raise EntryError(f"its manifest names the arch {arch!r}, which is not one of {name}'s")
    if host not in elf.MACHINES or not re.fullmatch(r"\w*", runtime):  # parts of a folder's name
        raise EntryError(f"its manifest names the runtime {runtime!r} and the host {host!r}")
    return parse(schema), Target(backend, arch, runtime, host)


def _usable(
    shown: Path, place: Path, binaries: Sequence[tuple[Entry, Schema, Target]]
) -> list[tuple[Entry, Schema, Target]]:
    """Return the binaries that this process can run: for each op, the best binary for each kind of
    device.

    Raises an error if an op does not have one, or if the user named a different binary.
    """
    best: dict[tuple[str, str], tuple[Entry, Schema, Target]] = {}
    refused: dict[str, Exception] = {}
    for entry, schema, target in binaries:
        try:
            _refuse_elsewhere(shown, schema, target)
        except (DeviceUnavailable, LoadError) as error:
            if entry.library == place:
                raise
            refused[schema.qualified] = error
            continue
        key = (schema.qualified, target.backend.name)
        if key not in best or rank(target) > rank(best[key][2]):
            best[key] = (entry, schema, target)
    for qualified, reason in refused.items():
        if all(qualified != op for op, _ in best):
            raise reason
    return list(best.values())


def _refuse_elsewhere(shown: Path, schema: Schema, target: Target) -> None:
    """Raise an error unless this process can run the target's binaries."""
    missing = target.backend.available()
    if missing:
        raise DeviceUnavailable(f"{shown} is not loaded: {missing}")
    here = Target(target.backend, target.backend.host_arch(), target.backend.runtime(None))
    if not target.backend.runs(target.arch) or target._replace(arch=here.arch) != here:
        raise LoadError(
            f"{shown} is not loaded: it was built for {target}, but this process runs {here}; build it for that: "
            f"opjit.build_library({schema.qualified!r}, DIR, arch={here.arch!r})"
        )


def _declared(shown: Path, folder: Path, schema: Schema) -> Op:
    """Return the op of a binary: from this process or, if it does not declare the op, from the
    library.

    The caller holds `processes.reading`.
    """
    if registry.declared(schema.qualified) is None:
        try:
            registry.add_trusted(folder)
        except Exception as error:
            reason = (
                error
                if isinstance(error, OpjitError)
                else f"its {folder.name}/op.py raised {type(error).__name__}: {error}"
            )
            raise LoadError(f"{shown} is not loaded: {reason}") from error
    op = registry.declared(schema.qualified)
    if op is None or op.schema.text != schema.text:
        declares = (
            f"this process declares {op.schema.text!r} (in {op.folder})"
            if op
            else f"its {folder.name}/op.py does not"
        )
        raise DeclarationError(
            f"{shown} is not loaded: it was built for {schema.text!r}, but {declares}; build the library "
            "again, or import the declaration that it was built from"
        )
    return op

"""`opjit.load_library`: the ops of a library's folder, verified, declared and registered."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
        found = [_verified(shown, each) for each in _manifests(place, shown, path)]
    except (OSError, EntryError) as error:
        raise LoadError(
            f"{shown} is not loaded: {error}; build it again with opjit.build_library"
        ) from error
    with processes.reading:
        ops = [(each, _declared(shown, each)) for each in _usable(shown, place, found)]
    for binary, op in ops:
        libraries = op.declaration.libraries(binary.target)
        with op.lock:
            op.replace_kernel(binary.target.backend.name, binary.entry, libraries)
    if place.is_file():
        [named] = (each.schema.qualified for each in found if each.entry.library == place)
        return next(op.overload for _, op in ops if op.qualified == named)
    return [op.overload for op in sorted({op for _, op in ops}, key=lambda op: op.qualified)]


class _OpBinary(NamedTuple):
    """A verified binary of a library, for an op and a target."""

    entry: Entry
    schema: Schema
    target: Target

    @property
    def folder(self) -> Path:
        """The op's folder."""
        return self.entry.library.parents[5]


def _manifests(place: Path, shown: Path, path: StrPath) -> list[Path]:
    """Return the manifests of a library: of all op folders, or of the one of a ``.so``."""
    folders = registry.op_folders(place) if place.is_dir() else []
    if layers.holds(place):
        folders = [place.parents[5]]
        if not (folders[0] / "op.py").is_file():
            raise EntryError(f"there is no {folders[0] / 'op.py'}")
    elif place.is_file():
        raise LoadError(
            f"{shown} is not loaded: the rest of its op package is missing; copy the directory from opjit.build_library as a "
            "whole, and load it from there"
        )
    found = [
        manifest
        for folder in folders
        for manifest in (folder / layers.FOLDER).glob(f"{VERSION}/*/*/*/{manifests.NAME}")
    ]
    if not found:
        raise LoadError(
            f"there is no library {os.fspath(path)!r}: expected a path that opjit.build_library returned"
        )
    return sorted(found)


def _refuse_swappable(shown: Path, path: Path) -> None:
    problem = files.replacement_risk(path)
    if problem is not None:
        raise LoadError(f"{shown} is not loaded: {problem}")


def _verified(shown: Path, place: Path) -> _OpBinary:
    """Verify the entry of a manifest."""
    folder = place.parent
    _refuse_swappable(shown, folder)
    manifest, content, identity = read(folder)
    if manifest.key != folder.name:
        raise EntryError(f"the manifest in {folder} belongs to another build")
    try:
        schema, target = origin(manifest)
        check_library(content, target, manifest.link)
    except OpjitError as error:
        raise LoadError(f"{shown} is not loaded: {error}") from error
    entry = Entry(folder, manifest.key, folder / manifest.library, verified=identity)
    return _OpBinary(entry, schema, target)


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


def _usable(shown: Path, place: Path, binaries: Sequence[_OpBinary]) -> list[_OpBinary]:
    """Return the binaries that this process can run: for each op, the best binary for each kind of
    device.

    Raises an error if an op does not have one, or if the user named a different binary.
    """
    best = dict[tuple[str, str], _OpBinary]()
    refused = dict[str, Exception]()
    for each in binaries:
        try:
            _refuse_elsewhere(shown, each.schema, each.target)
        except (DeviceUnavailable, LoadError) as error:
            if each.entry.library == place:
                raise
            refused[each.schema.qualified] = error
            continue
        use = each.schema.qualified, each.target.backend.name
        if use not in best or rank(each.target) > rank(best[use].target):
            best[use] = each
    for qualified in refused.keys() - {op for op, _ in best}:
        raise refused[qualified]
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


def _declared(shown: Path, binary: _OpBinary) -> Op:
    """Return the op of a binary: from this process or, if it does not declare the op, from the
    library.

    The caller holds `processes.reading`.
    """
    schema = binary.schema
    op_py = f"its {binary.folder.name}/op.py"
    if registry.declared(schema.qualified) is None:
        try:
            registry.add_trusted(binary.folder)
        except Exception as error:
            reason: object = error
            if not isinstance(error, OpjitError):
                reason = f"{op_py} raised {type(error).__name__}: {error}"
            raise LoadError(f"{shown} is not loaded: {reason}") from error
    op = registry.declared(schema.qualified)
    if op is None or op.schema.text != schema.text:
        declares = (
            f"this process declares {op.schema.text!r} (in {op.folder})"
            if op
            else f"{op_py} does not"
        )
        raise DeclarationError(
            f"{shown} is not loaded: it was built for {schema.text!r}, but {declares}; build the library "
            "again, or import the declaration that it was built from"
        )
    return op

"""`opjit.load_library`: the ops of a library's folder, verified, declared and registered."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from opjit import backends, files, loader, processes
from opjit.backends.targets import Target
from opjit.declare import catalog
from opjit.declare.op import Op, no_fake
from opjit.errors import DeclarationError, DeviceUnavailable, EntryError, LoadError, OpjitError
from opjit.library import contents
from opjit.library.contents import Contents, Item
from opjit.recipe.schema import Schema, parse
from opjit.store.entry import Entry, check_library, read
from opjit.store.manifest import Manifest

_declarations: dict[str, dict[str, str]] = {}  # the Python files that declared ops of libraries: their digests, by op


class _Binary(NamedTuple):
    """One op of a library, verified."""

    entry: Entry
    schema: Schema
    target: Target
    item: Item


class _Library(NamedTuple):
    """A library, verified.

    Attributes:
        place: what was asked for: the folder, or an op's library in it.
        root: the folder.
        others: the files that no manifest names, by their path in the folder.
    """

    place: Path
    root: Path
    contents: Contents
    binaries: list[_Binary]
    others: dict[str, bytes]


def load_library(path: str | os.PathLike[str]) -> Any:
    """Load a library from `opjit.build_library`: declare its ops as their op.py does, and register their kernels. Compiles nothing.

    Every file is verified, for this machine too, before one is run or opened. The op.py files in the library run as those of
    `opjit.add_path` do, so meta tensors, torch.compile and autograd work. An op that this process declares already keeps its
    declaration: the schemas must be equal, and the library replaces a kernel that is loaded. An op that no op.py declared is known by
    its schema alone: it runs, but without a backward and a fake kernel.

    ``torch.ops.load_library(path)`` alone registers nothing; once opjit is imported, asking torch.ops for the op does all this.

    Args:
        path: of an op's ``.so`` in the library, or of the library's folder. Both load the whole library.

    Returns:
        The op of the ``.so``, a torch operator; for a folder, the list of the library's ops, sorted by name.

    Raises:
        LoadError: the library is missing, damaged, not trusted or not for this machine; its op.py raised an error; or the dynamic
            loader or torch rejected it.
        DeviceUnavailable: there is no device of that kind.
        DeclarationError: an op is declared with another schema, or was declared by the op.py of another library, which differs.

    Example:
        >>> library = opjit.build_library(["allreduce", "mylib::scale"], "build", "cpu", name="my_ops")
        >>> scale, allreduce = opjit.load_library(library)  # in another process, too
        >>> allreduce(torch.ones(3))
        tensor(3.)
        >>> opjit.load_library("build/my_ops/mylib.scale/mylib.scale.so") is scale
        True
    """
    library = _verified(path)
    for binary in library.binaries:
        _refuse_elsewhere(library.place, binary.schema, binary.target)
    with processes.reading:
        ops = [_declared(library, binary) for binary in library.binaries]
    for op, binary in zip(ops, library.binaries, strict=True):
        _register(library, op, binary)
    if library.place == library.root:
        return [op.overload for op in ops]
    return next(op.overload for op, binary in zip(ops, library.binaries, strict=True) if binary.entry.library == library.place)


def _verified(path: str | os.PathLike[str]) -> _Library:
    """Read and check all files of a library."""
    place = Path(os.path.realpath(path))
    root = place if place.is_dir() else place.parent.parent
    try:
        if not place.is_file() and not (root / contents.NAME).is_file():
            raise LoadError(f"there is no library {os.fspath(path)!r}: expected a path that opjit.build_library returned")
        _refuse_swappable(place, Path(os.getcwd(), path))
        described = contents.read(root)
        binaries = [_binary(place, root, item) for _, item in sorted(described.ops.items())]
        if place not in (root, *(binary.entry.library for binary in binaries)):
            raise EntryError(f"the library in {root} does not name it")
        for name in described.files:
            _refuse_swappable(place, root / name)
        return _Library(place, root, described, binaries, {name: contents.read_file(root, name, described) for name in described.files})
    except FileNotFoundError as error:
        missing = str(error.filename)
        missing = f"{contents.NAME} in the folder above its own" if missing == str(root / contents.NAME) else missing
        raise LoadError(f"{place} is not loaded: there is no {missing}; copy the folder from opjit.build_library as a whole") from None
    except (OSError, EntryError) as error:
        raise LoadError(f"{place} is not loaded: {error}; build it again with opjit.build_library") from error


def _refuse_swappable(place: Path, path: Path) -> None:
    problem = files.swappable(path)
    if problem is not None:
        raise LoadError(f"{place} is not loaded: {problem}")


def _binary(place: Path, root: Path, item: Item) -> _Binary:
    """Verify one op's entry."""
    described, content, verified = read(root / item.folder)
    if described.key != item.key:
        raise EntryError(f"the manifest in {item.folder} belongs to another build")
    try:
        schema, target = origin(described)
        check_library(content, target, described.link)
    except OpjitError as error:
        raise LoadError(f"{place} is not loaded: {error}") from error
    folder = root / item.folder
    return _Binary(Entry(folder, described.key, folder / described.library, verified=verified), schema, target, item)


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


def _declared(library: _Library, binary: _Binary) -> Op:
    """The op of a binary: as this process declares it, else as the library does. The caller holds `processes.reading`."""
    qualified, folder = binary.schema.qualified, binary.item.declared_in
    known = catalog.declared(qualified)
    if known is None and folder is None:
        with processes.declaring:
            fake = no_fake(binary.schema, f"it is known from {library.place} only; import the module that declares it before "
                           "opjit.load_library, or declare it in an op.py, which a library carries")
            return catalog.add(Op(binary.schema.text, fake, library.root / binary.item.folder, library=library.root))
    if known is None and folder is not None:
        _run(library, folder)
        known = catalog.declared(qualified)
    if known is None or known.schema.text != binary.schema.text:
        declares = f"this process declares {known.schema.text!r} (in {known.folder})" if known else f"its {folder}/op.py does not"
        raise DeclarationError(f"{library.place} is not loaded: it was built for {binary.schema.text!r}, but {declares}; build the library "
                               "again, or import the declaration that it was built from")
    digests = library.contents.declaration(folder) if folder is not None else {}
    if known.library is not None and _declarations.setdefault(qualified, digests) != digests:
        raise DeclarationError(f"{library.place} is not loaded: this process has {qualified} from {known.library}, whose op.py differs; "
                               "load this library in a process of its own")
    return known


def _run(library: _Library, folder: str) -> None:
    """Run an op.py of a library."""
    names = library.contents.declaration(folder)
    place = library.root / contents.PYTHON / folder
    try:
        catalog.declare_library(library.root, place, {name: library.others[f"{contents.PYTHON}/{folder}/{name}"] for name in names})
    except ImportError as error:
        raise LoadError(f"{library.place} is not loaded: its {folder}/op.py needs what this process cannot import: {error}") from error
    except OpjitError as error:
        raise LoadError(f"{library.place} is not loaded: {error}") from error
    except Exception as error:
        raise LoadError(f"{library.place} is not loaded: its {folder}/op.py raised {type(error).__name__}: {error}") from error


def _register(library: _Library, op: Op, binary: _Binary) -> None:
    """Register a binary as its op's kernel, in place of one that is loaded."""
    before = [str(library.root / path) for path in binary.item.before] if op.library else op.libraries(binary.target)
    with op.lock:
        loaded = op.loaded.get(binary.target.backend.name)
        if loaded is None:
            op.loaded[binary.target.backend.name] = loader.load(binary.entry, op.qualified, before)
        else:
            loaded.replace(binary.entry, op.qualified)

"""`opjit.build_library`: ops, their binaries and their declarations as one folder."""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from opjit import files, request, resources
from opjit.backends.targets import Target
from opjit.catalog import registry
from opjit.declare.op_state import OpState
from opjit.errors import BuildError, DeclarationError, EntryError
from opjit.files import StrPath
from opjit.library import standalone
from opjit.operators.op import Op
from opjit.store import layers
from opjit.store import manifest as manifests
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store
from opjit.wanted import target_of

# Files that a copy of an op's folder leaves out.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", layers.FOLDER, "test_*.py")
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}"


def build_library(
    ops: str | Sequence[str],
    build_directory: StrPath,
    device: object = None,
    arch: str | Sequence[str] | None = None,
    name: str | None = None,
) -> Path:
    """Build ops if they are not cached, and write them with their declarations into an op package. Loads nothing.

    An op package is a directory with everything that another process needs: the directory of each op with its fake kernel and backward,
    and binaries next to the sources, like in a wheel. Ops of one op.py go together. An op without an op.py, for example from
    `opjit.inline`, has only its schema there.

    With a name, opjit also writes ``DIR/<name>.so`` for programs that use torch without opjit: ``torch.ops.load_library`` of it defines the
    ops. It contains all binaries, so it can be copied alone. Fake kernels and backwards are Python, and are not part of it.

    Args:
        ops: ``"allreduce"``, ``"namespace::name"``, or a list of names.
        build_directory: created if missing. It gets a directory for the op package, which can be copied as a whole. Nothing is ever
            overwritten, so another build gets another directory.
        device: a kind of device of this machine. None means the current accelerator, or the CPU. With a name, None means all devices
            of this machine that the ops support.
        arch: another architecture, for example ``"sm_90"`` or ``"x86-64-v3"``, which this machine need not have. With a name, you can
            pass several.
        name: the name of the op package. The default is derived from the first op, the architecture and the content.

    Returns:
        The path of the op's ``.so``, which is a link, or for a list, of the op package. `opjit.load_library` accepts both.

    Raises:
        UnknownOp, UnknownDevice, UnknownArch, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`.
        DeclarationError: an op.py changed since it was read, or an op is linked with a library outside its directory.
        BuildError: the directory is not writable, the name exists, or it has characters other than letters, digits and ``_.+-``.

    Example:
        >>> opjit.build_library("allreduce", "build", "cpu", name="sums")
        PosixPath('build/sums/opjit.allreduce.so')
        >>> opjit.build_library(["allreduce", "mylib::scale"], "build", "cpu", name="my_ops")
        PosixPath('build/my_ops')
    """
    requested = [registry.find(each) for each in ([ops] if isinstance(ops, str) else ops)]
    if not requested:
        raise BuildError(
            "opjit.build_library: expected at least one op, got an empty list", op="", target=""
        )
    targets = _targets(requested, device, arch, name)
    shown = ", ".join(op.qualified for op in requested)
    wanted = ", ".join(map(str, targets))
    if name is not None and not (isinstance(name, str) and re.fullmatch(_NAME, name)):
        raise BuildError(
            f"{name!r} is not a valid name for an op package: expected at most 100 letters, "
            "digits, '_', '.', '+' and '-', with a letter or digit first",
            op=shown,
            target=wanted,
        )
    entries = dict[Op, list[tuple[Target, Entry]]]()
    for target in targets:
        for op in _together(requested, target):
            entries.setdefault(op, []).append((target, request.entry(op, target)))
    _require_same_declarations(entries)
    directory = Path(build_directory)
    try:
        root = _write_library(requested[0], targets, entries, directory, name)
        if name is not None:
            standalone.write_standalone(directory / f"{name}.so", entries)
    except (OSError, EntryError) as error:
        raise BuildError(
            f"{shown} for {wanted} cannot be copied to {os.fspath(build_directory)!r}: {error}; choose a directory that "
            "you can write",
            op=shown,
            target=wanted,
        ) from error
    return root / f"{_dotted(requested[0])}.so" if isinstance(ops, str) else root


def _targets(
    requested: Sequence[Op], device: object, arch: str | Sequence[str] | None, name: str | None
) -> list[Target]:
    """Return the targets of a library, this machine's CPU first."""
    if name is None and not isinstance(arch, str | None):
        raise BuildError(
            "a library of several architectures needs a name; pass name=, or one architecture",
            op=requested[0].qualified,
            target=", ".join(arch),
        )
    devices: list[object] = [device]
    if device is None and arch is None and name is not None:
        devices = [*sorted({each for op in requested for each in op.devices()})] or devices
    archs = [arch] if isinstance(arch, str | None) else list(arch)
    found = [target_of(kind, each) for kind in devices for each in archs or [None]]
    hosts = sorted({target.host for target in found})
    if name is not None and len(hosts) > 1:
        shown = " and ".join(hosts)
        raise BuildError(
            f"the library {name} cannot hold binaries for {shown}: a shared library is for one of them; choose a name for each",
            op=name,
            target=shown,
        )
    return sorted(dict.fromkeys(found), key=lambda target: target.backend.name != "cpu")


def put_binary(entry: Entry, manifest: Manifest, source_folder: Path) -> Path:
    """Write a binary where `layers` looks for it, next to the op's source.

    Returns the library's path.
    """
    store = Store(source_folder / layers.FOLDER)
    folder = store.base.joinpath(*entry.folder.parts[-3:])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifest.library).write_bytes(entry.library.read_bytes())
    (folder / manifests.NAME).write_bytes(manifest.dump())
    return folder / manifest.library


def _dotted(op: OpState) -> str:
    return op.qualified.replace("::", ".")


def _has_op_py(op: Op) -> bool:
    return (
        op.declaration.code is None
        and op.declaration.file is not None
        and op.declaration.file.name == "op.py"
    )


def _together(requested: Sequence[Op], target: Target) -> list[Op]:
    """Return the requested ops, and the remaining ops of their op.py files that have a kernel
    for the target, sorted by name.
    """
    found = {op.qualified: op for op in requested}
    shared = {op.declaration.file for op in requested if _has_op_py(op)}
    for op in registry.all_ops():
        beside = op.declaration.file in shared and op.declaration.code is None
        if beside and target.backend.name in op.backends():
            found[op.qualified] = op
    return [found[name] for name in sorted(found)]


def _require_same_declarations(ops: Iterable[Op]) -> None:
    """Raise DeclarationError unless a copy of the ops' folders declares them as this process does."""
    places = dict[str, Path]()
    for op in ops:
        extra = op.declaration.flags_of_author
        linked = (*extra.link, *extra.cuda_link) if extra is not None else ()
        for each in linked:
            is_library = os.path.isabs(each) and each.endswith(".so")
            inside = _has_op_py(op) and Path(each).resolve().is_relative_to(op.folder.resolve())
            if is_library and not inside:
                raise DeclarationError(
                    f"{op.qualified} is linked with {each}, which is outside the directory of its op.py, so it would "
                    "not be in the op package; move it there"
                )
        if not _has_op_py(op):
            continue
        other = places.setdefault(op.folder.name, op.folder)
        if other != op.folder:
            raise DeclarationError(
                f"two directories of ops are named {other.name}: {other} and {op.folder}; rename one, "
                "because each becomes a directory of the op package"
            )
        if op.declaration.stamp != op.declaration.stamp_now():
            raise DeclarationError(
                f"{op.declaration.file} changed after this process read it; build the library in a new process, or call "
                f"opjit.reload({op.qualified!r}) first"
            )


def _write_library(
    first: Op,
    targets: Sequence[Target],
    entries: dict[Op, list[tuple[Target, Entry]]],
    directory: Path,
    name: str | None,
) -> Path:
    """Put the library's folder into a directory, unless it is there. Raises OSError or EntryError if that fails."""
    directory.mkdir(parents=True, exist_ok=True)
    staged = directory / f".{files.random_name()}"
    staged.mkdir(mode=0o755)
    try:
        for op, found in entries.items():
            for _, entry in found:
                _copy(op, entry, staged)
        digests = _digests(staged, seal=True)
        digest = files.sha256(repr(digests))
        place = directory / (name or f"{_dotted(first)}.{targets[0].folder}.{digest[:20]}")
        if not files.put_if_free(staged, place) and _digests(place) != digests:
            raise BuildError(
                f"{place} exists with different content, and opjit does not overwrite it; remove "
                "it, or choose another name",
                op=first.qualified,
                target=", ".join(map(str, targets)),
            )
        return place
    finally:
        files.remove_tree(staged)


def _copy(op: Op, entry: Entry, root: Path) -> None:
    """Copy an op's folder, unless it is there, and its binary into a library. An op without an op.py gets one, with its schema."""
    to = root / (op.folder.name if _has_op_py(op) else _dotted(op))
    if not to.exists() and _has_op_py(op):
        shutil.copytree(op.folder, to, ignore=_left_out, copy_function=shutil.copyfile)
    elif not to.exists():
        to.mkdir()
        values = {
            "schema": repr(op.schema.text),
            "differentiable": not op.constant,
            "elementwise": op.elementwise,
            "archs": list(op.declaration.archs),
            "tags": ", ".join(f"torch.Tag.{name}" for name in op.schema.tags),
        }
        (to / "op.py").write_text(resources.filled("library/op.py.in", **values), "utf-8")
    manifest = manifests.read_manifest(entry.folder)
    library = put_binary(entry, manifest, to)
    link = root / f"{_dotted(op)}.so"
    if not link.is_symlink():  # the first target's
        link.symlink_to(library.relative_to(root))


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names in an op's folder that its copy leaves out, for example libraries that
    were built into it.
    """
    return {
        *LEFT_OUT(folder, names),
        *(name for name in names if any(Path(folder, name).glob(f"*/{layers.FOLDER}"))),
    }


def _digests(root: Path, seal: bool = False) -> dict[str, str]:
    """Return the SHA-256 of each file of a library, by its path in the folder, and the links; without the byte code that Python writes.
    `seal`: flush everything to disk, and let all users read but not write it."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(names):
            path = Path(folder, name)
            found[str(path.relative_to(root))] = (
                os.readlink(path) if path.is_symlink() else files.digest(str(path))
            )
            if seal and not path.is_symlink():
                path.chmod(0o644)
                files.sync(path)
        if seal:
            os.chmod(folder, 0o755)
            files.sync(Path(folder))
    return found

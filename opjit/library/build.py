"""`opjit.build_library`: ops, their binaries and their declarations as one folder."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from opjit import files, request
from opjit.backends.targets import Target
from opjit.declare import carried, catalog
from opjit.declare.op import Op
from opjit.errors import BuildError, DeclarationError, EntryError, NoKernel
from opjit.library import contents
from opjit.library.contents import Contents, Item
from opjit.recipe import libraries
from opjit.store.entry import MAX_BYTES, Entry, verify
from opjit.wanted import target_of

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


def build_library(ops: str | Sequence[str], build_directory: str | os.PathLike[str], device: object = None, arch: str | None = None,
                  name: str | None = None) -> Path:
    """Build ops, or take them from the cache, and copy them with their declarations to a folder. Loads nothing.

    The folder holds all that another process needs: the binaries, and each op.py with the modules beside it that it imports
    (``from .shapes import rows``), so fake kernels and backwards. Ops of one op.py go together. An op that no op.py declares, such as
    one of `opjit.inline`, is known there by its schema alone.

    Args:
        ops: ``"allreduce"``, ``"namespace::name"``, or a list of such names.
        build_directory: created if missing. The library gets a folder of its own in it, which can be copied as a whole. Nothing is
            ever overwritten: another build gets another folder.
        device: build for this machine's device of that kind; None means the current accelerator, else the CPU.
        arch: build for this arch (``"sm_90"``, ``"x86-64-v3"``) instead, which this machine need not have.
        name: of the library's folder; the default is made of the first op, the arch and the content.

    Returns:
        The path of the op's ``.so``, or, for a list, of the library's folder; `opjit.load_library` takes both.

    Raises:
        UnknownOp, UnknownDevice, UnknownArch, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`.
        DeclarationError: an op.py imports a file of its folder in a way that works only there, or changed since it was read.
        BuildError: the folder is not writable, the name has other characters than letters, digits and ``_.+-``, or another library
            has it.

    Example:
        >>> opjit.build_library("allreduce", "build", "cpu", name="sums")
        PosixPath('build/sums/opjit.allreduce/opjit.allreduce.so')
        >>> opjit.build_library(["allreduce", "mylib::scale"], "build", "cpu", name="my_ops")
        PosixPath('build/my_ops')
    """
    asked = [catalog.find(each) for each in ([ops] if isinstance(ops, str) else ops)]
    if not asked:
        raise BuildError("a library of no op: name one or more", op="", target="")
    target, shown = target_of(device, arch), ", ".join(op.qualified for op in asked)
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise BuildError(f"{name!r} cannot be a library's name: expected letters, digits, '_', '.', '+' and '-', with a letter or digit "
                         "first, at most 100", op=shown, target=str(target))
    entries = {op: request.entry(op, target) for op in _together(asked, target)}
    python = _declarations(entries)
    try:
        root = _write(asked[0], target, entries, python, Path(build_directory), name)
    except (OSError, EntryError) as error:
        raise BuildError(f"{shown} for {target} cannot be copied to {os.fspath(build_directory)!r}: {error}; choose a folder that "
                         "you can write", op=shown, target=str(target)) from error
    if not isinstance(ops, str):
        return root
    return root / _dotted(asked[0]) / entries[asked[0]].library.name


def _dotted(op: Op) -> str:
    return op.qualified.replace("::", ".")


def _has_op_py(op: Op) -> bool:
    return op.code is None and op.file is not None and op.file.name == "op.py"


def _together(asked: Sequence[Op], target: Target) -> list[Op]:
    """The ops that are asked for, and the others of their op.py files that have a kernel for the target, sorted by name."""
    found = {op.qualified: op for op in asked}
    shared = {op.file for op in asked if _has_op_py(op)}
    for op in catalog.all_ops():
        if op.file in shared and op.code is None:
            with suppress(NoKernel):
                op.source(target.backend)
                found[op.qualified] = op
    return [found[name] for name in sorted(found)]


def _declarations(ops: Iterable[Op]) -> dict[str, dict[str, bytes]]:
    """The Python files that declare ops, by the name of the op's folder, then by path in it."""
    found: dict[str, dict[str, bytes]] = {}
    places: dict[str, Path] = {}
    for op in filter(_has_op_py, ops):
        assert op.file is not None
        other = places.setdefault(op.folder.name, op.folder)
        if other != op.folder:
            raise DeclarationError(f"two folders of ops are named {other.name}: {other} and {op.folder}; rename one, as each becomes a "
                                   "folder of the library")
        if op.stamp != op.stamp_now():
            raise DeclarationError(f"{op.file} changed after this process read it; build the library in a new process, or call "
                                   f"opjit.get({op.qualified!r}, reload=True) first")
        if op.folder.name not in found:
            found[op.folder.name] = carried.collect(op.file)
    return found


def _write(first: Op, target: Target, entries: dict[Op, Entry], python: dict[str, dict[str, bytes]], directory: Path,
           name: str | None) -> Path:
    """Put the library's folder into a directory, unless it is there. Raises OSError or EntryError if that fails."""
    directory.mkdir(parents=True, exist_ok=True)
    staged, aside = (directory / f".{files.unique()}" for _ in range(2))
    staged.mkdir(mode=0o755)
    try:
        described = _fill(staged, target, entries, python)
        place = directory / (name or f"{_dotted(first)}.{target.folder}.{described.digest[:20]}")
        if name is None:
            files.put_in_place(staged, place, aside, lambda there: _is_good(there, described, target))
        else:
            files.put_if_free(staged, place)
            if not _is_good(place, described, target):
                raise BuildError(f"{place} holds something else already, and nothing is overwritten; remove it, or choose another name",
                                 op=first.qualified, target=str(target))
        _verify(place, described, target)
        return place
    finally:
        files.remove_tree(staged)
        files.remove_tree(aside)


def _fill(root: Path, target: Target, entries: dict[Op, Entry], python: dict[str, dict[str, bytes]]) -> Contents:
    """Write a library's files to an empty folder."""
    digests: dict[str, str] = {}

    def write(path: str, content: bytes, listed: bool = True) -> None:
        for folder in reversed(Path(path).parents):
            (root / folder).mkdir(mode=0o755, exist_ok=True)
        files.write_synced(root / path, content)
        if listed:
            digests[path] = hashlib.sha256(content).hexdigest()

    items = {}
    for op, entry in entries.items():
        for name in os.listdir(entry.folder):
            write(f"{_dotted(op)}/{name}", files.read(entry.folder / name, MAX_BYTES), listed=False)
        before = []
        for each in (each for each in libraries.files(op.flags(target)) if each.endswith(".so")):
            before.append(f"{contents.SHARED}/{_dotted(op)}/{os.path.basename(each)}")
            write(before[-1], Path(each).read_bytes())
        items[op.qualified] = Item(_dotted(op), entry.key, op.folder.name if _has_op_py(op) else None, tuple(before))
    for folder, texts in python.items():
        for path, content in texts.items():
            write(f"{contents.PYTHON}/{folder}/{path}", content)
    described = Contents(items, digests)
    write(contents.NAME, described.dump(), listed=False)
    for folder, _, _ in os.walk(root):
        files.sync(Path(folder))
    return described


def _is_good(root: Path, described: Contents, target: Target) -> bool:
    with suppress(EntryError, OSError):
        _verify(root, described, target)
        return True
    return False


def _verify(root: Path, described: Contents, target: Target) -> None:
    """Raise EntryError or OSError unless a folder holds a library, whole and as other processes take it."""
    if contents.read(root) != described:
        raise EntryError(f"{root} has another {contents.NAME}")
    for path in described.files:
        contents.read_file(root, path, described)
    for item in described.ops.values():
        verify(root / item.folder, target, item.key)

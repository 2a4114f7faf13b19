"""Trees: directories, such as the caches of other compilers, in one signed file.

    opjit cache pack engines.tree --tree TRITON_CACHE_DIR ~/.triton/cache --sign ci.key
    opjit run --tree engines.tree serve.py

A tree is a bundle (store/bundle.py). Its manifest lists the files of each directory with their SHA-256, so the signature covers them.

    <root>/v2/trees/<SHA-256 of the manifest>/<variable>/    the copy of a directory, to which the variable leads the program

`open_tree` writes the copy once. Later, it compares signatures of the files from stat, and restores the files that have changed.
The program may add files to the copy. The tree itself never changes.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from opjit import files
from opjit.errors import EntryError, RemoteError, UntrustedFolder
from opjit.files import StrPath
from opjit.recipe import reads
from opjit.share import trust
from opjit.share.trust import Trust
from opjit.store import bundle
from opjit.store.bundle import Bundle
from opjit.store.store import TREES, default_store
from opjit.typed_json import typed

_FORMAT = 1
_MAX_MANIFEST = 16 << 20  # bytes
_MAX_FILE = 1 << 31  # bytes
_VARIABLE = r"[A-Z][A-Z0-9_]*"
_PATH = _VARIABLE + r"(/(?!\.\.?(/|$))[^/\0]+)*"  # of a variable's directory, or of a file in it
_NOTE = "signatures"  # the name of the note on the files of a copy; no variable has it


class PackedFile(NamedTuple):
    """A file of a tree.

    Attributes:
        path: the variable of its directory, and the path in it.
        size: its bytes.
        sha256: their digest.
        modified: the time of its last change, in nanoseconds, which build tools compare.
        runs: whether its owner may execute it.
        has_paths: whether it is a text with the path of a packed directory, which the copy's path replaces.
    """

    path: str
    size: int
    sha256: str
    modified: int
    runs: bool
    has_paths: bool


class TransferReport(NamedTuple):
    """The result of a transfer.

    Attributes:
        moved: the names of the objects that were transferred.
        there: the number of entries that already existed.
        problems: a line for each entry that was left out, with the reason.
    """

    moved: list[str]
    there: int
    problems: list[str]


class Tree(NamedTuple):
    """The manifest of a tree: its format, the packed directories by their variables, and their files."""

    format: int
    roots: dict[str, str]
    files: list[PackedFile]

    def dump(self) -> bytes:
        listed = [each._asdict() for each in self.files]
        return json.dumps({**self._asdict(), "files": listed}).encode()

    def moved(self, content: bytes, place: Path) -> bytes:
        """Replace the paths of the packed directories in a text by the paths of their copies."""
        copies = {
            os.fsencode(root): os.fsencode(place / variable)
            for variable, root in self.roots.items()
        }
        return re.sub(_paths(self.roots), lambda found: copies[found[0]], content)


def pack_tree(path: StrPath, roots: Mapping[str, Path], sign: StrPath | None) -> TransferReport:
    """Write the files of directories into a tree.

    Args:
        path: the tree. An existing file is replaced when the new one is complete.
        roots: the directories, by the variables that lead to them.
        sign: a file with the private key that signs the tree. Only OPJIT_TRUST=unsigned accepts an unsigned tree.

    Raises:
        RemoteError: there is nothing to pack, the file cannot be written, or the key cannot be read.
    """
    place = Path(path)
    staged = place.parent / f".{files.random_name()}"
    problems: list[str] = []
    packed = []
    named = {name: os.path.abspath(root) for name, root in roots.items()}
    try:
        with tempfile.TemporaryFile(dir=place.parent) as contents:
            for each, content in _listed(named, problems):
                packed.append(each)
                contents.write(content)
            if not packed:
                raise RemoteError(
                    "\n".join([f"expected files in {', '.join(named.values())}", *problems])
                )
            head = trust.signer(sign)(Bundle(Tree(_FORMAT, named, packed).dump(), b""))
            contents.seek(0)
            with staged.open("xb") as file:
                file.write(head.dump())
                shutil.copyfileobj(contents, file)
        files.sync(staged)
        os.replace(staged, place)
    except OSError as error:
        raise RemoteError(f"{place} cannot be written: {error}; choose another place") from error
    finally:
        with suppress(OSError):
            staged.unlink()
    return TransferReport([each.path for each in packed], 0, problems)


def open_tree(path: Path, base: Path | None = None) -> dict[str, str]:
    """Return the variables of a tree, and the directories of its copy, which it writes or repairs.

    The copy is below `base`. None means below the cache.

    Raises RemoteError if no trusted key signed the tree, if it is damaged, or if the copy cannot be written.
    """
    trusted = trust.required(str(path))
    try:
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:  # opening a pipe must not block
            tree, key = _read_manifest(file, trusted)
            place = (base or default_store().base / TREES) / key
            files.make_private(place)
            problem = files.replacement_risk(place)
            if problem is not None:
                raise UntrustedFolder(problem)
            _repair(file, tree, place)
    except (OSError, EntryError) as error:
        raise RemoteError(f"the tree {path} is not used: {error}") from error
    return {variable: str(place / variable) for variable in tree.roots}


def _listed(roots: Mapping[str, str], problems: list[str]) -> Iterator[tuple[PackedFile, bytes]]:
    """Yield the files of directories with their contents.

    If other users can write a file or directory, `problems` gets a line about it.
    """
    for variable, root in roots.items():
        if not re.fullmatch(_VARIABLE, variable):
            raise RemoteError(
                f"expected the name of a variable such as TRITON_CACHE_DIR, got {variable!r}"
            )
        for folder, inner, names in os.walk(root):
            inner.sort()
            risk = files.replacement_risk(Path(folder))
            if risk is not None:
                problems.append(f"{folder} is left out: {risk}")
                inner.clear()
                continue
            for name in sorted(names):
                place = Path(folder, name)
                try:
                    yield _described(place, f"{variable}/{place.relative_to(root)}", roots)
                except (OSError, EntryError) as error:
                    problems.append(f"{place} is left out: {error}")


def _described(place: Path, path: str, roots: Mapping[str, str]) -> tuple[PackedFile, bytes]:
    content = files.read(place, _MAX_FILE)
    status = place.stat()
    runs = os.access(place, os.X_OK)
    has_paths = False
    with suppress(UnicodeDecodeError):  # no text
        has_paths = "\0" not in content.decode() and bool(re.search(_paths(roots), content))
    digest = files.sha256(content)
    described = PackedFile(path, len(content), digest, status.st_mtime_ns, runs, has_paths)
    return described, content


def _paths(roots: Mapping[str, str]) -> bytes:
    """Return the pattern of the paths of directories in a text, if they are not parts of other names."""
    longest_first = sorted(roots.values(), key=len, reverse=True)
    either = "|".join(map(re.escape, longest_first))
    return rb"(?<![\w./-])(" + os.fsencode(either) + rb")(?![\w.-])"


def _read_manifest(file: BinaryIO, trusted: Trust) -> tuple[Tree, str]:
    """Return a tree's manifest and its SHA-256, and leave the file at its first content. The signature is checked before the parsing."""
    head = file.read(_MAX_MANIFEST)
    found = bundle.parse_bundle(head, _MAX_MANIFEST)
    trusted.check(found)
    file.seek(len(head) - len(found.library))
    try:
        tree: Tree = typed(json.loads(found.manifest), Tree)
    except (ValueError, TypeError, RecursionError) as error:
        raise EntryError(f"expected a file from `opjit cache pack --tree`: {error}") from error
    if tree.format != _FORMAT:
        raise EntryError(f"its format is {tree.format}, and this version of opjit reads {_FORMAT}")
    for path in (*tree.roots, *(each.path for each in tree.files)):
        if not re.fullmatch(_PATH, path) or path.partition("/")[0] not in tree.roots:
            raise EntryError(f"{path!r} is neither a variable nor the path of a file below one")
    return tree, files.sha256(found.manifest)


def _repair(file: BinaryIO, tree: Tree, place: Path) -> None:
    """Write the files of the copy that are missing or have changed."""
    known = files.read_checked(place / _NOTE)
    signatures = {**known} if isinstance(known, dict) else {}
    for packed in tree.files:
        target = place / packed.path
        before = signatures.get(packed.path)
        if before is not None and before == reads.signature(str(target)):
            file.seek(packed.size, os.SEEK_CUR)
            continue
        content = file.read(packed.size)
        if (len(content), files.sha256(content)) != (packed.size, packed.sha256):
            raise EntryError(f"{packed.path} does not have the size and the SHA-256 in the list")
        files.make_private(target.parent)
        content = tree.moved(content, place) if packed.has_paths else content
        files.write_whole(target, content, synced=False)
        target.chmod(0o700 if packed.runs else 0o600)
        os.utime(target, ns=(packed.modified, packed.modified))
        signatures[packed.path] = reads.signature(str(target))
    if signatures != known:
        os.sync()  # a note on files that a power cut leaves empty would hide that
        files.write_checked(place / _NOTE, signatures)

"""The entries of a store: names, sizes and dates. Nothing is verified, no file is opened."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from opjit.store.store import KEY, PARTS, SHARED, SPECIAL, Store

_BASE = r"-[0-9a-f]{20}$"


class EntryInfo(NamedTuple):
    """An entry of the cache.

    Times are in seconds since 1970.

    Attributes:
        folder: the directory of the entry.
        op: the qualified name of the op, or ``cpp_extension::<name>``.
        arch: the target, for example ``sm_90.cuda13.x86_64``.
        key: the cache key, which is the name of the directory.
        size: the bytes of all its files.
        read: the access time of its library. Linux updates it about once a day, and never if the filesystem is mounted with noatime.
        written: the modification time of its library.
        published: the time at which the entry appeared.
    """

    folder: Path
    op: str
    arch: str
    key: str
    size: int
    read: float
    written: float
    published: float

    @property
    def used(self) -> float:
        """The last known use."""
        return max(self.read, self.written)


def scan(store: Store) -> Iterator[EntryInfo]:
    """Yield all entries, unordered. Skips other folders, and entries that are being removed."""
    for op in _folders(store.base):
        for arch in _folders(op.path) if op.name not in SPECIAL else ():
            of_op = not op.name.startswith(("cpp_extension.", "shared_library."))
            target = re.sub(_BASE, "", arch.name) if of_op else arch.name
            folder = Path(arch.path)
            for entry in _folders(arch.path):
                if KEY.fullmatch(entry.name):
                    with suppress(OSError):
                        yield _item(folder, entry, op.name.replace(".", "::", 1), target)


def parts(store: Store) -> list[EntryInfo]:
    """Return the outputs of compilers that builds keep for later builds, the least recently used first."""
    found = []
    for folder in (store.base / PARTS, store.base / PARTS / SHARED):
        for entry in _folders(folder):
            if entry.name != SHARED:
                with suppress(OSError):
                    item = _item(folder, entry, PARTS, "")
                    used = item.folder.stat().st_mtime  # each use sets it
                    found.append(item._replace(read=used))
    return sorted(found, key=lambda item: item.read)


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    """Return the folders in a folder, without symbolic links; none if it cannot be read."""
    try:
        with os.scandir(path) as found:
            return [entry for entry in found if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _item(folder: Path, entry: os.DirEntry[str], op: str, arch: str) -> EntryInfo:
    published = entry.stat(follow_symlinks=False).st_ctime
    size = 0
    read = 0.0
    written = 0.0
    with os.scandir(entry.path) as found:
        for file in found:
            status = file.stat(follow_symlinks=False)
            size += status.st_size
            if file.name.endswith(".so"):
                read = max(read, status.st_atime)
                written = max(written, status.st_mtime)
    # Path(entry.path) would parse the whole path again.
    return EntryInfo(folder / entry.name, op, arch, entry.name, size, read, written, published)

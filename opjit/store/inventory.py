"""What lies in a store, as the folders tell it: names, sizes and dates. Nothing is verified, and no file is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from opjit.store import SPECIAL, Store

_KEY = re.compile(r"[0-9a-f]{64}")


class Item(NamedTuple):
    """An entry, as far as its folder shows it.

    Attributes:
        op: qualified name of an op, or ``cpp_extension::<name>``.
        arch: name of the target's folder: ``x86-64-v3``, ``sm_90.cuda13``.
        key: the folder's name.
        size: bytes of all its files.
        read, written: when its library was, in seconds since 1970. Linux writes down a read about once a day; on a filesystem that is
            mounted with noatime it does not.
        published: when the folder appeared, by the filesystem's own clock.
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
        """When it was used last, as well as that is known."""
        return max(self.read, self.written)


def scan(store: Store) -> Iterator[Item]:
    """All entries, in no order. What looks like none is left out, and so is what goes away meanwhile."""
    for op in folders(store.base):
        if op.name in SPECIAL:
            continue
        for arch in folders(op.path):
            for entry in folders(arch.path):
                if _KEY.fullmatch(entry.name):
                    item = _item(entry, op.name.replace(".", "::", 1), arch.name)
                    if item is not None:
                        yield item


def folders(path: str | Path) -> list[os.DirEntry[str]]:
    """The folders in a folder, no symbolic links among them; none where it cannot be read."""
    try:
        with os.scandir(path) as found:
            return [entry for entry in found if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _item(entry: os.DirEntry[str], op: str, arch: str) -> Item | None:
    try:
        own = entry.stat(follow_symlinks=False)
        size, read, written = 0, 0.0, 0.0
        with os.scandir(entry.path) as found:
            for file in found:
                status = file.stat(follow_symlinks=False)
                size += status.st_size
                if file.name.endswith(".so") or status.st_mode & 0o100:  # the library, or the program that an extension makes
                    read, written = max(read, status.st_atime), max(written, status.st_mtime)
    except OSError:
        return None
    return Item(Path(entry.path), op, arch, entry.name, size, read, written, own.st_ctime)

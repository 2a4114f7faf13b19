"""An extension's entry and what is done with it: opened, or copied to where a build directory or setuptools wants it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from opjit import files, loader, request
from opjit.cpp_extension.binary import ExtensionBinary
from opjit.errors import LoadError
from opjit.store import manifest
from opjit.store.entry import Entry

_R = TypeVar("_R")


def with_entry(wanted: ExtensionBinary, use: Callable[[Entry], _R], found: Entry | None = None) -> _R:
    """Find or build an extension, unless the caller has `found` it, and use its entry: another one, if it is removed before that."""
    for store in request.stores():
        entry = found or request.look(wanted, store) or request.obtain(wanted, store)
        try:
            return use(entry)
        except (OSError, ImportError, LoadError) as error:
            if entry.library.exists() and not isinstance(error, loader.Gone):
                raise
            gone, found = error, None
    raise gone


def copy_library(entry: Entry, place: Path) -> None:
    """Copy the binary that was verified."""
    with loader.pinned(entry) as path:
        _put(Path(path).read_bytes(), place, 0o755)


def copy_entry(entry: Entry, place: Path) -> None:
    """Copy the binary, and the files beside it under their names. Equal files are not written again."""
    copy_library(entry, place)
    for source in entry.folder.iterdir():
        if source != entry.library and source.name != manifest.NAME:
            _put(source.read_bytes(), place.parent / source.name, 0o644)


def _put(content: bytes, place: Path, mode: int) -> None:
    if not place.exists() or place.read_bytes() != content:
        files.write_whole(place, content)
        place.chmod(mode)

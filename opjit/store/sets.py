"""Complete sets: a file for each list of ops whose entries are all in a store; see FORMAT.md.

    <root>/v1/sets/<SHA-256 of `fits`>
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files
from opjit.errors import EntryError
from opjit.recipe.recipe import document_key
from opjit.store.store import SETS, Store

MAX_BYTES = 64 << 20


class CompleteSet(NamedTuple):
    """The entries that a list needs.

    Attributes:
        path: the list's, when its last entry was built.
        fits: what the set is for: the list's SHA-256, the options, and the versions of all that decides keys but the next two.
        entries: the names of the requests, by their entries' folders: below ``v1``, or absolute for a binary beside its source.
        files: SHA-256 of the files that were compiled, by path.
        stamps: `files.stamp` of the same: who finds these need not read the file.
        compilers: what the entries were made by: a backend or ``"C++"``, its runtime, and the versions in the manifest.
    """

    path: str
    fits: dict[str, Any]
    entries: dict[str, str]
    files: dict[str, str]
    stamps: dict[str, list[int]]
    compilers: list[tuple[str, str, dict[str, str] | None]]

    def save(self, store: Store) -> Path:
        """Write the set's file. Raises OSError if it cannot be written."""
        fields = self._asdict()
        place = store.base / SETS / document_key(self.fits)
        files.make_private(place.parent)
        files.write_whole(place, json.dumps({**fields, "sha256": document_key(fields)}).encode("ascii"))
        return place


def read(path: Path) -> CompleteSet | None:
    """Return the set of a file; None if it is damaged, or others could have written it."""
    try:
        fields = json.loads(files.read(path, MAX_BYTES))
        return CompleteSet(**fields) if fields.pop("sha256") == document_key(fields) else None
    except (OSError, EntryError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def known(stores: Iterable[Store]) -> Iterator[CompleteSet]:
    """Yield all sets of some stores."""
    for store in stores:
        folder = store.base / SETS
        if os.path.isdir(folder) and store.problem(folder) is None:
            yield from filter(None, map(read, sorted(folder.iterdir())))


def covering(op: str, stores: Iterable[Store]) -> str:
    """Say which set holds an op, for the error of a request that must not build it; empty if none does."""
    for each in known(stores):
        names = sorted(name for name in each.entries.values() if name.startswith(f"{op} for "))
        if names:
            return (f". The complete set of {each.path} has {', '.join(names)}: `opjit precompile --check {each.path}` says whether it is "
                    "still complete, and for which runtime")
    return ""

"""Entries whose keys cover headers that only their build found: how a request recognises one in the store, a layer or the remote."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from opjit import files
from opjit.errors import EntryError
from opjit.recipe.recipe import base_key
from opjit.store import layers
from opjit.store import store as stores
from opjit.store.entry import Entry
from opjit.store.store import Store


class Keyed(Protocol):
    """What decides the bytes of a binary."""

    @property
    def key(self) -> str:
        """The hash of its document, without the headers that a compiler found."""

    @property
    def base(self) -> str:
        """The hash of it without its compilers."""

    @property
    def place_of_entries(self) -> str:
        """The folder below v1 of the entries that differ only in their compilers, and in the headers that those found."""

    def document(self) -> dict[str, Any]:
        """The document that the key hashes; a build adds the headers that the compiler found."""

    def place(self, name: str) -> str:
        """The path of a portable name. Raises EntryError if it is in no folder that is known here."""


def find(ways: Iterable[Keyed], store: Store, warn: bool, everywhere: bool) -> Entry | None:
    """Return the verified entry of one of several ways, or None. Without a compiler here, the binary of any compiler is accepted.

    Args:
        everywhere: in the layers, too.
    """
    ways = list(ways)
    for root in layers.named() if everywhere else ():
        found = _find_in(ways, Store(root), warn)
        if found is not None:
            return replace(found, origin="layer")
    return _find_in(ways, store, warn)


def _find_in(ways: Iterable[Keyed], store: Store, warn: bool) -> Entry | None:
    for way in ways:
        folder, wanted = store.base / way.place_of_entries, way.document()
        if store.trusted(folder.parent, folder):
            found = stores.first(folder, None, functools.partial(fits, way, wanted), warn)
            if found is not None:
                return found
    return None


def fits(way: Keyed, wanted: dict[str, Any], document: dict[str, Any]) -> bool:
    """Return whether a document is that of the wanted entry, whose own lacks the headers that a compiler found."""
    found = document.get("found")
    compilers = document.get("toolchain") if wanted["toolchain"] is None else wanted["toolchain"]
    if document != {**wanted, "toolchain": compilers, "found": found}:
        return False
    if not isinstance(found, dict):
        raise EntryError("its manifest does not list the headers that the compiler found")
    try:
        return all(files.digest(way.place(name)) == content for name, content in found.items())
    except OSError:
        return False


def fetch(way: Keyed, name: str, store: Store) -> Entry | None:
    """Fetch an entry from the remote, if one is named, into the store."""
    if not os.environ.get("OPJIT_REMOTE"):
        return None
    from opjit.share import remote

    wanted = way.document()

    def is_wanted(key: str, document: dict[str, Any]) -> bool:
        if base_key({**document, "found": {}}) != way.base:
            raise EntryError(remote.MISMATCH)
        return fits(way, wanted, document)

    return remote.fetch(remote.Query(name, f"v1/{way.place_of_entries}", (), f"{way.key}.key", None, is_wanted), store)

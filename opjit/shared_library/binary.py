"""A request for a binary from any sources: how a look-up recognizes its entry, whose key covers headers that only a build found."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from opjit import processes
from opjit.errors import BuildError, EntryError, NotCached
from opjit.recipe.build_inputs import B, entries_folder
from opjit.recipe.document import base_key, document_key
from opjit.shared_library.identity import Library
from opjit.store import layers
from opjit.store import store as stores
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store

_B = TypeVar("_B", bound="ContentBinary[Any]")


@dataclass(frozen=True)
class ContentBinary(Generic[B]):
    """A request for a library or an extension; see `opjit.wanted.Wanted`."""

    content: B
    must_store: bool = False
    by_torch: ClassVar = True
    kind: ClassVar = None

    def __str__(self) -> str:
        return f"{self.content.name} for {self.content.purpose}"

    @property
    def ways(self) -> tuple[B, ...]:
        """The contents whose binaries are as good as each other, the preferred first."""
        return (self.content,)

    @property
    def name(self) -> str:
        return self.ways[0].key

    lock = name

    @property
    def buildable(self) -> bool:
        return any(way.toolchain is not None for way in self.ways)

    def folder(self, store: Store, manifest: Manifest | None = None) -> Path:
        return store.base / (
            self.ways[0].place_of_entries if manifest is None else entries_folder(manifest.document)
        )

    def names(self, entry: Entry) -> set[str]:
        return {name for way in self.ways for name in (way.key, way.base)}

    def accepts(self, manifest: Manifest) -> bool:
        return any(way.fits(manifest.document) for way in self.ways)

    def find(self, store: Store, warn: bool = True, hashed: bool = True) -> Entry | None:
        above = [] if self.must_store else [*map(Store, layers.named())]
        for each, way in itertools.product([*above, store], self.ways):
            folder = each.base / way.place_of_entries
            if each.trusted(folder.parent, folder):
                found = stores.first(
                    folder, None, functools.partial(_fits, way, store), warn, hashed=hashed
                )
                if found is not None:
                    return found if each is store else replace(found, origin="layer")
        return None

    def miss(self, store: Store) -> str:
        return f"{self} is not cached"

    def fault(self, text: str) -> BuildError:
        return BuildError(text, op=self.content.name, target=self.content.purpose)

    def refusal(self, text: str) -> BuildError:
        return NotCached(text, op=self.content.name, target=self.content.purpose)

    def in_store(self: _B) -> _B:
        return replace(self, must_store=True)

    def now(self: _B, store: Store) -> _B:
        return replace(self, content=self.content.now())

    def fetch(self, store: Store) -> Entry | None:
        return self.fetch_way(self.content, store)

    def fetch_way(self, way: B, store: Store) -> Entry | None:
        """Fetch an entry of one way from the remote, if one is named, into the store."""
        if not os.environ.get("OPJIT_REMOTE"):
            return None
        from opjit.share import remote

        def is_wanted(key: str, document: dict[str, Any]) -> bool:
            if base_key(document) != way.base:
                raise EntryError(remote.MISMATCH)
            return way.fits(document)

        return remote.fetch(
            remote.Query(
                str(self),
                f"{stores.VERSION}/{way.place_of_entries}",
                [f"{way.key}.key"],
                None,
                is_wanted,
            ),
            store,
        )


class LibraryBinary(ContentBinary[Library]):
    """A request for a shared library."""

    by_torch = False

    def build(self, store: Store) -> Entry:
        with processes.importing:
            from opjit.shared_library import compilation
        return compilation.build(self.content, store, self.must_store)


def _fits(way: B, store: Store, document: dict[str, Any]) -> bool:
    """Return whether a document is that of the wanted entry; `store` keeps signatures of the files that it names."""
    return way.fits(document, store.seen(document_key(document)))

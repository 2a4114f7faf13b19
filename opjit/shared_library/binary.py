"""A request for a shared library: how to find it in the cache, and how to build it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from opjit import processes
from opjit.errors import BuildError
from opjit.shared_library import identity, lookup
from opjit.shared_library.identity import Library
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store


@dataclass(frozen=True)
class LibraryBinary:
    """A shared library; see `opjit.wanted.Wanted`."""

    library: Library
    must_store: bool = False

    def __str__(self) -> str:
        return f"{self.library.name} for {self.library.purpose}"

    @property
    def lock(self) -> str:
        return self.library.key

    @property
    def name(self) -> str:
        return self.library.key

    @property
    def buildable(self) -> bool:
        return self.library.toolchain is not None

    @property
    def large(self) -> bool:
        return "cuda" in self.library.languages

    @property
    def by_torch(self) -> bool:
        return False

    @property
    def kind(self) -> None:
        return None

    def folder(self, store: Store, manifest: Manifest | None = None) -> Path:
        return store.base / (self.library.place_of_entries if manifest is None else identity.entries_folder(manifest.document))

    def names(self, entry: Entry) -> set[str]:
        return {self.library.key, self.library.base}

    def accepts(self, manifest: Manifest) -> bool:
        return lookup.fits(self.library, self.library.document(), manifest.document)

    def find(self, store: Store, warn: bool = True) -> Entry | None:
        return lookup.find([self.library], store, warn, everywhere=not self.must_store)

    def miss(self, store: Store) -> str:
        return f"{self} is in no cache"

    def fault(self, text: str) -> BuildError:
        return BuildError(text, op=self.library.name, target=self.library.purpose)

    def refusal(self, text: str) -> BuildError:
        return self.fault(text)

    def in_store(self) -> LibraryBinary:
        return replace(self, must_store=True)

    def now(self, store: Store) -> LibraryBinary:
        return replace(self, library=self.library.scanned())

    def fetch(self, store: Store) -> Entry | None:
        return lookup.fetch(self.library, str(self), store)

    def build(self, store: Store) -> Entry:
        with processes.importing:
            from opjit.shared_library import compilation
        return compilation.build(self.library, store, self.must_store)

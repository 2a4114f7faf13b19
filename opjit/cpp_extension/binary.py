"""A request for an extension's binary: how to find it in the cache, and how to build it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from opjit import files
from opjit.cpp_extension.identity import Extension
from opjit.errors import BuildError, EntryError
from opjit.store import store as stores
from opjit.store.entry import Entry
from opjit.store.store import Store


class ExtensionBinary(NamedTuple):
    """An extension and the call that requests it; see `opjit.wanted.Wanted`.

    Attributes:
        arguments: of load or load_inline, by name.
    """

    extension: Extension
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.extension.name} for {self.extension.purpose}"

    @property
    def lock(self) -> str:
        return self.extension.key

    def find(self, store: Store, warn: bool = True) -> Entry | None:
        """Without a compiler here, the binary of any compiler is accepted."""
        wanted = self.extension.document()

        def fits(known: dict[str, Any]) -> bool:
            found = known.get("found")
            compilers = known.get("toolchain") if wanted["toolchain"] is None else wanted["toolchain"]
            return known == {**wanted, "toolchain": compilers, "found": found} and self._holds(found)

        shelf = self.extension.shelf(store)
        return stores.first(shelf, None, fits, warn) if store.trusted(shelf.parent, shelf) else None

    def _holds(self, found: object) -> bool:
        """Whether the headers that the compiler found are unchanged."""
        if not isinstance(found, dict):
            raise EntryError("its manifest does not list the headers that the compiler found")
        try:
            return all(files.digest(self.extension.place(name)) == content for name, content in found.items())
        except OSError:
            return False

    def miss(self, store: Store) -> str:
        return f"{self} is in no cache"

    def refusal(self, text: str) -> BuildError:
        return BuildError(text, op=self.extension.name, target=self.extension.purpose)

    def now(self, store: Store) -> ExtensionBinary:
        return self._replace(extension=self.extension._replace(inputs=self.extension.inputs_now()))

    def fetch(self, store: Store) -> None:
        """Extensions are not shared: each depends on one torch, one Python and the headers of one machine."""

    def build(self, store: Store) -> Entry:
        from opjit.cpp_extension import build

        return build.build(self.extension, self.arguments, store)

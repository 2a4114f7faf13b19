"""A request for an extension's binary: how to find it in the cache, and how to build it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files
from opjit.cpp_extension import facade, identity, vocabulary
from opjit.cpp_extension.identity import Extension
from opjit.environment import is_on
from opjit.errors import BuildError, EntryError, LoadError
from opjit.recipe.recipe import base_key
from opjit.store import layers
from opjit.store import store as stores
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store


def of_call(arguments: Mapping[str, Any], notes: Path | None, archs: str | None = None, fast: bool = True) -> ExtensionBinary:
    """Return the request that a call of load or load_inline makes.

    Args:
        arguments: of torch's function, by name.
        notes: the folder of notes on compilers.
        archs: to compile CUDA code for; see `identity.describe`.
        fast: whether light headers may be tried.

    Raises:
        Unsupported, FileNotFoundError, BuildError, UnknownArch: see `identity.describe`.
    """
    return ExtensionBinary(identity.describe(arguments, notes, archs), arguments, fast=fast and is_on("OPJIT_FAST", unset=True))


class ExtensionBinary(NamedTuple):
    """An extension and the call that requests it; see `opjit.wanted.Wanted`.

    A binary with light headers and one with torch's own are as good as each other; see `ways`.

    Attributes:
        extension: as built with torch's own headers.
        arguments: of load or load_inline, by name.
        must_store: it must end up in the store; a layer's entry or a private folder does not count.
        fast: light headers may be tried.
    """

    extension: Extension
    arguments: Mapping[str, Any]
    must_store: bool = False
    fast: bool = True

    def __str__(self) -> str:
        return f"{self.extension.name} for {self.extension.purpose}"

    @property
    def ways(self) -> tuple[Extension, ...]:
        """The extension with the headers to try, in this order."""
        if not self.fast:
            return (self.extension,)
        light = self.extension._replace(facade=facade.version())
        return *(light._replace(toolchain=compilers) for compilers in self.extension.light_toolchains), self.extension

    def without_light(self) -> str | None:
        """Why only torch's own headers will do. It reads the sources, so only what has to fetch or build asks."""
        implicit = not self.extension.sources and not self.arguments.get("no_implicit_headers")
        return vocabulary.refusal(self.extension, implicit) if self.fast else "fast=False or OPJIT_FAST=0"

    @property
    def lock(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return self.ways[0].key

    @property
    def buildable(self) -> bool:
        return any(way.toolchain is not None for way in self.ways)

    @property
    def large(self) -> bool:
        return True

    @property
    def kind(self) -> None:
        return None

    def shelf(self, store: Store, described: Manifest | None = None) -> Path:
        return self.ways[0].shelf(store) if described is None else store.base / identity.shelf_name(described.document)

    def names(self, entry: Entry) -> set[str]:
        return {name for way in self.ways for name in (way.key, way.base)}

    def takes(self, described: Manifest) -> bool:
        return any(self._fits(described.document, way.document()) for way in self.ways)

    def find(self, store: Store, warn: bool = True) -> Entry | None:
        """Without a compiler here, the binary of any compiler is accepted."""
        for root in () if self.must_store else layers.named():
            found = self._find_in(Store(root), warn, layers.ADVICE)
            if found is not None:
                return replace(found, origin="layer")
        return self._find_in(store, warn)

    def _find_in(self, store: Store, warn: bool, advice: str = stores.ADVICE) -> Entry | None:
        for way in self.ways:
            shelf, wanted = way.shelf(store), way.document()
            if store.trusted(shelf.parent, shelf, advice=advice):
                found = stores.first(shelf, None, functools.partial(self._fits, wanted=wanted), warn)
                if found is not None:
                    return found
        return None

    def _fits(self, known: dict[str, Any], wanted: dict[str, Any]) -> bool:
        """Whether an entry with the document `known` is the wanted one, whose document lacks the headers that a compiler found."""
        found = known.get("found")
        compilers = known.get("toolchain") if wanted["toolchain"] is None else wanted["toolchain"]
        return known == {**wanted, "toolchain": compilers, "found": found} and self._holds(found)

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

    def fetch(self, store: Store) -> Entry | None:
        if not os.environ.get("OPJIT_REMOTE"):
            return None
        ways = self.ways if self.without_light() is None else (self.extension,)
        return next(filter(None, (self._fetch(way, store) for way in ways)), None)

    def _fetch(self, way: Extension, store: Store) -> Entry | None:
        from opjit.share import remote

        wanted = way.document()

        def fits(key: str, known: dict[str, Any]) -> bool:
            if base_key({**known, "found": {}}) != way.base:
                raise EntryError(remote.MISMATCH)
            return self._fits(known, wanted)

        place = f"v1/{identity.shelf_name(wanted)}"
        return remote.fetch(remote.Sought(str(self), place, (), f"{way.key}.key", None, fits), store)

    def build(self, store: Store) -> Entry:
        """With light headers, if they may do and the compiler agrees; else with torch's own."""
        from opjit.cpp_extension import build

        reason = self.without_light()
        if reason is None:
            try:
                return build.build(self.ways[0], self.arguments, store, self.must_store)
            except (BuildError, LoadError) as error:
                if self.extension.toolchain is None:  # there is no nvcc for the other way
                    raise
                reason = str(error).partition("\n")[0]
        return build.build(self.extension._replace(reason=reason), self.arguments, store, self.must_store)

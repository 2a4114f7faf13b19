"""A request for an extension's binary: how to find it in the cache, and how to build it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files
from opjit.cpp_extension import identity, light
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import policy
from opjit.environment import is_on
from opjit.errors import BuildError, EntryError
from opjit.recipe.recipe import base_key
from opjit.store import layers
from opjit.store import store as stores
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store


def of_call(call: LoadCall | InlineCall, notes: Path | None, archs: str | None = None) -> ExtensionBinary:
    """Return the request that a call of load or load_inline makes.

    Args:
        notes: the folder of notes on compilers.
        archs: the archs to compile CUDA code for; see `identity.describe`.

    Raises:
        Unsupported, FileNotFoundError, BuildError, UnknownArch: see `identity.describe`.
    """
    return ExtensionBinary(identity.describe(call, notes, archs), call, fast=call.fast and is_on("OPJIT_FAST", unset=True))


class ExtensionBinary(NamedTuple):
    """An extension and the call that requests it; see `opjit.wanted.Wanted`.

    A binary with light headers and one with torch/extension.h are as good as each other; see `ways`.

    Attributes:
        extension: as built with torch/extension.h.
        call: of load or load_inline.
        must_store: it must end up in the store; a layer's entry or a private folder does not count.
        fast: light headers may be tried.
    """

    extension: Extension
    call: LoadCall | InlineCall
    must_store: bool = False
    fast: bool = True

    def __str__(self) -> str:
        return f"{self.extension.name} for {self.extension.purpose}"

    @property
    def ways(self) -> tuple[Extension, ...]:
        """The extension with the headers to try, in this order."""
        if not self.fast:
            return (self.extension,)
        with_light = self.extension._replace(light=light.VERSION)
        return *(with_light._replace(toolchain=compilers) for compilers in self.extension.light_toolchains), self.extension

    def without_light(self) -> str | None:
        """Return why only torch/extension.h will do. It reads the sources, so only what has to fetch or build asks."""
        return policy.refusal(self.extension, self.call.implicit) if self.fast else "fast=False or OPJIT_FAST=0"

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
    def by_torch(self) -> bool:
        return True

    @property
    def kind(self) -> None:
        return None

    def folder(self, store: Store, manifest: Manifest | None = None) -> Path:
        return self.ways[0].entries_folder(store) if manifest is None else store.base / identity.entries_folder(manifest.document)

    def names(self, entry: Entry) -> set[str]:
        return {name for way in self.ways for name in (way.key, way.base)}

    def accepts(self, manifest: Manifest) -> bool:
        return any(self._fits(manifest.document, way.document()) for way in self.ways)

    def find(self, store: Store, warn: bool = True) -> Entry | None:
        """Without a compiler here, the binary of any compiler is accepted."""
        for root in () if self.must_store else layers.named():
            found = self._find_in(Store(root), warn, layers.ADVICE)
            if found is not None:
                return replace(found, origin="layer")
        return self._find_in(store, warn)

    def _find_in(self, store: Store, warn: bool, advice: str = stores.ADVICE) -> Entry | None:
        for way in self.ways:
            folder, wanted = way.entries_folder(store), way.document()
            if store.trusted(folder.parent, folder, advice=advice):
                found = stores.first(folder, None, functools.partial(self._fits, wanted=wanted), warn)
                if found is not None:
                    return found
        return None

    def _fits(self, document: dict[str, Any], wanted: dict[str, Any]) -> bool:
        """Return whether a document is that of the wanted entry, whose own lacks the headers that a compiler found."""
        found = document.get("found")
        compilers = document.get("toolchain") if wanted["toolchain"] is None else wanted["toolchain"]
        return document == {**wanted, "toolchain": compilers, "found": found} and self._holds(found)

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

    def fault(self, text: str) -> BuildError:
        return BuildError(text, op=self.extension.name, target=self.extension.purpose)

    def refusal(self, text: str) -> BuildError:
        return self.fault(text)

    def sources(self, document: Mapping[str, Any]) -> dict[str, str]:
        return {self.extension.place(name): digest for name, digest in {**self.extension.inputs, **document["found"]}.items()}

    def in_store(self) -> ExtensionBinary:
        return self._replace(must_store=True)

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

        def fits(key: str, document: dict[str, Any]) -> bool:
            if base_key({**document, "found": {}}) != way.base:
                raise EntryError(remote.MISMATCH)
            return self._fits(document, wanted)

        place = f"v1/{identity.entries_folder(wanted)}"
        return remote.fetch(remote.Query(str(self), place, (), f"{way.key}.key", None, fits), store)

    def build(self, store: Store) -> Entry:
        """Build with light headers and opjit's binding or, if that does not know a type, pybind11's; if they may lack something, with
        torch/extension.h."""
        from opjit.cpp_extension import build

        reason, first, refused = self.without_light(), self.ways[0], None
        for way in (first, first._replace(pybind11=True)) if reason is None else ():
            try:
                return build.build(way, self.call, store, self.must_store)
            except light.MayLack as lack:
                refused, reason = lack, str(lack).partition("\n")[0]
                if policy.UNKNOWN_TYPE not in str(lack):
                    break
        if refused is not None and self.extension.toolchain is None:  # there is no nvcc for torch/extension.h
            raise refused.error
        return build.build(self.extension._replace(reason=reason or ""), self.call, store, self.must_store)

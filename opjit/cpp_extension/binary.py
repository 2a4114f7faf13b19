"""A request for an extension's binary: how to find it in the cache, and how to build it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from opjit.cpp_extension import identity, light
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import policy
from opjit.environment import is_on
from opjit.errors import BuildError
from opjit.shared_library import lookup
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
        return store.base / (self.ways[0].place_of_entries if manifest is None else identity.entries_folder(manifest.document))

    def names(self, entry: Entry) -> set[str]:
        return {name for way in self.ways for name in (way.key, way.base)}

    def accepts(self, manifest: Manifest) -> bool:
        return any(lookup.fits(way, way.document(), manifest.document) for way in self.ways)

    def find(self, store: Store, warn: bool = True) -> Entry | None:
        return lookup.find(self.ways, store, warn, everywhere=not self.must_store)

    def miss(self, store: Store) -> str:
        return f"{self} is in no cache"

    def fault(self, text: str) -> BuildError:
        return BuildError(text, op=self.extension.name, target=self.extension.purpose)

    def refusal(self, text: str) -> BuildError:
        return self.fault(text)

    def in_store(self) -> ExtensionBinary:
        return self._replace(must_store=True)

    def now(self, store: Store) -> ExtensionBinary:
        return self._replace(extension=self.extension._replace(inputs=self.extension.inputs_now()))

    def fetch(self, store: Store) -> Entry | None:
        ways = self.ways if os.environ.get("OPJIT_REMOTE") and self.without_light() is None else (self.extension,)
        return next(filter(None, (lookup.fetch(way, str(self), store) for way in ways)), None)

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

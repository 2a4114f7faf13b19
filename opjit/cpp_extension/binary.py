"""A request for an extension's binary: the equivalent ways to build it, and the uses of its entry."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opjit import files, loader
from opjit.cpp_extension import identity, stable
from opjit.cpp_extension.arguments import CALLS, InlineCall, LoadCall
from opjit.cpp_extension.identity import Extension, Unsupported
from opjit.environment import is_on
from opjit.errors import CompileWarning, RecordError
from opjit.processes import CachedProperty
from opjit.store import manifest
from opjit.store.entry import Entry
from opjit.store.store import Store
from opjit.wanted import BinaryRequest

if TYPE_CHECKING:
    from opjit.declare.oplist import RecordedExtension


def of_call(
    call: LoadCall | InlineCall, notes: Path | None, archs: str | None = None
) -> ExtensionRequest:
    """Return the request that a call of load or load_inline makes; see `identity.describe`."""
    call = identity.expanded(call)
    return ExtensionRequest(
        identity.describe(call, notes, archs),
        call=call,
        fast=call.fast and is_on("OPJIT_FAST", unset=True),
    )


def of_recorded(recorded: RecordedExtension, folder: str, store: Store) -> ExtensionRequest:
    """Return the request that a recorded call makes, for the architectures that it was recorded for.

    `folder` contains the list. Raises RecordError if a source is missing or only torch can build the extension, and BuildError if an
    argument is wrong.
    """
    from opjit.shared_library.recorded import arguments_of  # late: no hit needs it

    try:
        call = CALLS[recorded.function].of(arguments_of(recorded, folder))
        wanted = of_call(call, store.notes, recorded.archs)
        return replace(wanted, inputs=replace(wanted.inputs, only_listed=True))
    except FileNotFoundError as error:
        raise RecordError(
            f"cannot build the C++ extension {recorded.name}: {error.filename} does not exist; keep the list next to the "
            "sources, or restore that path"
        ) from error
    except (Unsupported, TypeError) as error:
        raise RecordError(
            f"cannot build the C++ extension {recorded.name}: its arguments do not match "
            f"{recorded.function}, or only torch can build it"
        ) from error


@dataclass(frozen=True)
class ExtensionRequest(BinaryRequest):
    """An extension with torch/extension.h, and the call that requests it. `fast`: opjit may try light headers."""

    inputs: Extension
    call: LoadCall | InlineCall = field(kw_only=True)
    fast: bool = field(kw_only=True)

    @property
    def ways(self) -> tuple[Extension, ...]:
        return *self._stable, *(self._light if self.fast else ()), self.inputs

    @property
    def _light(self) -> tuple[Extension, ...]:
        return tuple(
            replace(self.inputs, light=identity.LIGHT, toolchain=compilers)
            for compilers in self.inputs.light_toolchains
        )

    @CachedProperty
    def _stable(self) -> tuple[Extension, ...]:
        version = stable.target(self.inputs, self.call.implicit)
        return (replace(self.inputs, stable=version),) if version else ()

    def without_light(self) -> str | None:
        """Return the reason to use torch/extension.h, or None."""
        if (
            self._stable and self.inputs.toolchain is not None
        ):  # light headers are for one version, and bind to Python
            return f"it targets torch's stable ABI of {self._stable[0].stable}"
        return None if self.fast else "fast=False or OPJIT_FAST=0"

    def fetch(self, store: Store) -> Entry | None:
        tried = self._light if self.without_light() is None else ()
        found = (self.fetch_ways([way], store) for way in (*self._stable, *tried, self.inputs))
        return next(filter(None, found), None)

    def build(self, store: Store) -> Entry:
        """Build with light headers or, if these fail, with torch/extension.h.

        Light headers use opjit's binding first, and pybind11's binding if opjit's lacks a type.
        """
        from opjit.cpp_extension import build, light
        from opjit.cpp_extension.light import policy

        reason = self.without_light()
        first = self._light[0]
        refused = None
        for way in (first, replace(first, pybind11=True)) if reason is None else ():
            try:
                return build.build(way, self.call, store, self.must_store)
            except light.NeedsFullHeaders as lack:
                refused = lack
                reason = str(lack).partition("\n")[0]
                if policy.UNKNOWN_TYPE not in str(lack):
                    break
        if (
            refused is not None and self.inputs.toolchain is None
        ):  # there is no nvcc for torch/extension.h
            raise refused.error
        last = replace((*self._stable, self.inputs)[0], reason=reason or "")
        entry = build.build(last, self.call, store, self.must_store)
        if refused is not None and refused.preprocessor:
            slow = f"{self.inputs.name} is built with torch's own headers, which is 10x slower"
            text = f"{slow}, because opjit's preprocessor failed: {reason}"
            warnings.warn(CompileWarning(text), stacklevel=2)
        return entry


def copy_library(entry: Entry, place: Path) -> None:
    """Copy the binary that was verified."""
    with loader.pinned(entry) as path:
        _put(Path(path).read_bytes(), place, 0o755)


def copy_entry(entry: Entry, place: Path) -> None:
    """Copy the binary, and the files next to it under their names. Equal files are not written again."""
    copy_library(entry, place)
    for source in entry.folder.iterdir():
        if source != entry.library and source.name != manifest.NAME:
            _put(source.read_bytes(), place.parent / source.name, 0o644)


def _put(content: bytes, place: Path, mode: int) -> None:
    if not place.exists() or place.read_bytes() != content:
        files.write_whole(place, content)
        place.chmod(mode)

"""Verify a store: compare each entry with its manifest, as a load does, and optionally with a new build."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from opjit import backends, files, library
from opjit.backends.targets import Target
from opjit.declare import registry
from opjit.errors import EntryError, NoKernel, OpjitError
from opjit.store import entry, inventory
from opjit.store import manifest as manifests
from opjit.store.inventory import Item
from opjit.store.manifest import Manifest
from opjit.store.store import Store
from opjit.wanted import OpBinary, describe

GOOD, BAD, REBUILT, DIFFERENT = "good", "bad", "the same when built again", "different when built again"


class Finding(NamedTuple):
    """The result for one entry.

    Attributes:
        verdict: one of this module's four.
        reason: why the entry is bad, was not built again, or was compared in part.
    """

    item: Item
    verdict: str
    reason: str = ""

    @property
    def in_order(self) -> bool:
        return self.verdict in (GOOD, REBUILT)


def verify(root: Store, rebuild: bool = False) -> Iterator[Finding]:
    """Verify all entries. Nothing is changed: the next request for a bad entry replaces it.

    Args:
        rebuild: also build the entries of ops that this process declares again, in a private folder, and compare the bytes. The same
            inputs give the same bytes, in any folder and for any user.

    Raises:
        OSError: there is no space for the private folder.
    """
    if rebuild:
        registry.search()
    for item in sorted(inventory.scan(root), key=lambda item: item.folder):
        try:
            manifest, target = _verify(root, item)
            foreign = _foreign(manifest)
        except (OpjitError, OSError) as error:
            if os.path.lexists(item.folder):  # otherwise it was removed meanwhile
                yield Finding(item, BAD, str(error))
            continue
        if foreign is not None:
            yield Finding(item, GOOD, f"only its bytes were compared: there is no backend {foreign!r}; opjit.register_backend adds it")
        else:
            yield _rebuild(root, item, manifest, target) if rebuild else Finding(item, GOOD)


def _verify(root: Store, item: Item) -> tuple[Manifest, Target | None]:
    """Verify an entry, as a load does, and return its manifest and target: None for a C++ extension, and for a backend that this process
    lacks."""
    manifest = manifests.parse(files.read(item.folder / manifests.NAME, manifests.MAX_BYTES))
    if manifest.document.get("made_by") is not None or _foreign(manifest) is not None:
        entry.verify(item.folder, None)
        return manifest, None
    schema, target = library.origin(manifest)
    if root.folder(schema.qualified, target) != item.folder.parent:
        raise EntryError(f"it is an entry of {schema.qualified} for {target}, but lies in another op's or target's folder")
    entry.verify(item.folder, target)
    return manifest, target


def _foreign(manifest: Manifest) -> str | None:
    """Return the backend that an entry was built for, if this process does not have it; a program that does have it compares more."""
    name = manifest.document.get("backend")
    return name if isinstance(name, str) and name not in [backend.name for backend in backends.all_backends()] else None


def _rebuild(root: Store, item: Item, manifest: Manifest, target: Target | None) -> Finding:
    op = registry.declared(item.op)
    if target is None:
        return Finding(item, GOOD, "only the caller of opjit.load knows the sources of a C++ extension")
    if op is None:
        return Finding(item, GOOD, "no op of that name is declared here")
    try:
        key = None
        with suppress(NoKernel, OSError):
            key = describe(op, target, root).key
        if key != manifest.key:
            return Finding(item, GOOD, "the op's sources, its flags or the compilers have changed")
        with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
            private = Store(Path(folder))
            again = OpBinary(op, target, describe(op, target, private), must_store=True).build(private)
            digest = files.digest(str(again.library))
    except (OpjitError, OSError) as error:
        return Finding(item, DIFFERENT, f"it cannot be built again: {error}")
    if digest == manifest.sha256:
        return Finding(item, REBUILT)
    return Finding(item, DIFFERENT, "the same sources, flags and compilers now give a different binary")



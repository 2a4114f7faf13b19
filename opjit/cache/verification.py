"""Verify a store: compare each entry with its manifest, as a load does."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from opjit import backends, files
from opjit.cache import origin
from opjit.errors import EntryError, OpjitError
from opjit.store import entry, inventory
from opjit.store import manifest as manifests
from opjit.store.inventory import Item
from opjit.store.store import Store

GOOD, BAD = "good", "bad"


class Finding(NamedTuple):
    """The result for one entry: ``"good"`` or ``"bad"``, and the reason why it is bad, or was compared in part."""

    item: Item
    verdict: str
    reason: str = ""


def verify(root: Store) -> Iterator[Finding]:
    for item in sorted(inventory.scan(root), key=lambda item: item.folder):
        try:
            finding = Finding(item, GOOD, _verify(root, item))
        except (OpjitError, OSError) as error:
            finding = Finding(item, BAD, str(error))
        if finding.verdict == GOOD or os.path.lexists(item.folder):  # otherwise it was removed meanwhile
            yield finding


def _verify(root: Store, item: Item) -> str:
    """Verify an entry. Returns what cannot be compared here: a program that has the entry's backend compares more."""
    manifest = manifests.parse(files.read(item.folder / manifests.NAME, manifests.MAX_BYTES))
    backend = manifest.document.get("backend")
    if isinstance(backend, str) and backend not in [each.name for each in backends.all_backends()]:
        entry.verify(item.folder, None)
        return f"only its bytes were compared: there is no backend {backend!r}; opjit.register_backend adds it"
    belongs = origin.of(manifest)
    if root.root / belongs.folder != item.folder.parent:
        raise EntryError(f"it is an entry of {belongs.title}, but lies in another op's or target's folder")
    entry.verify(item.folder, belongs.target)
    return ""

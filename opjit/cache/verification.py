"""Whether a store is in order: each entry held against its manifest as before a load, and built again where that is asked for."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from opjit import api, catalog, inventory, library, manifest, store
from opjit.errors import EntryError, NoKernel, OpjitError
from opjit.inventory import Item
from opjit.manifest import Manifest
from opjit.op import Op
from opjit.store import Entry, Store
from opjit.targets import Target

GOOD, BAD, REBUILT, DIFFERENT = "good", "bad", "the same when built again", "different when built again"


class Finding(NamedTuple):
    """What is known of one entry now.

    Attributes:
        verdict: one of this module's four.
        reason: why it is bad, or was not built again.
    """

    item: Item
    verdict: str
    reason: str = ""

    @property
    def in_order(self) -> bool:
        return self.verdict in (GOOD, REBUILT)


def verify(root: Store, rebuild: bool = False) -> Iterator[Finding]:
    """Look at all entries. Nothing is changed: what is bad is replaced when it is asked for.

    Args:
        rebuild: also build each entry again, in a private folder, that an op of this process would have today, and compare the bytes.
            The same inputs make the same bytes, in any folder and for any user.

    Raises:
        OSError: there is no room for a private folder.
    """
    if rebuild:
        catalog.search()
    for item in sorted(inventory.scan(root), key=lambda item: item.folder):
        try:
            described, op, target = _verify(root, item)
        except (OpjitError, OSError) as error:
            if os.path.lexists(item.folder):  # else somebody removed it meanwhile
                yield Finding(item, BAD, str(error))
            continue
        yield _rebuild(root, item, described, op, target) if rebuild else Finding(item, GOOD)


def _verify(root: Store, item: Item) -> tuple[Manifest, str, Target | None]:
    """An entry's manifest, and the op and target that it is of; None is a C++ extension.

    Raises:
        OpjitError, OSError: it would not be loaded.
    """
    described = manifest.parse(store.bounded(item.folder / manifest.NAME))
    if described.document.get("made_by") is not None:
        store.verify(item.folder, None, unnoticed=True)
        return described, item.op, None
    schema, target = library.origin(described)
    if root.folder(schema.qualified, target) != item.folder.parent:
        raise EntryError(f"it is an entry of {schema.qualified} for {target}, and lies where none of those is looked for")
    store.verify(item.folder, target, unnoticed=True)
    return described, schema.qualified, target


def _rebuild(root: Store, item: Item, described: Manifest, name: str, target: Target | None) -> Finding:
    op = catalog.declared(name)
    if target is None:
        return Finding(item, GOOD, "only its caller knows what a C++ extension is built from")
    if op is None:
        return Finding(item, GOOD, "no op of that name is declared here")
    try:
        if not _current(op, target, root, described):
            return Finding(item, GOOD, "the op's sources, its flags or the compilers are others today")
        with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
            again = _built(op, target, Store(Path(folder)))
            content = again.library.read_bytes()
    except (OpjitError, OSError) as error:
        return Finding(item, DIFFERENT, f"it cannot be built again: {error}")
    if hashlib.sha256(content).hexdigest() == described.sha256:
        return Finding(item, REBUILT)
    return Finding(item, DIFFERENT, "the same sources, flags and compilers make another binary today")


def _current(op: Op, target: Target, root: Store, described: Manifest) -> bool:
    try:
        return api.describe(op, target, root).key == described.key
    except (NoKernel, OSError):
        return False


def _built(op: Op, target: Target, private: Store) -> Entry:
    from opjit import build

    with build.without_collection():
        return build.build(api.describe(op, target, private), private)

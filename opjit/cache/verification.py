"""Find the owner of an entry from its manifest, and verify the entry like a request does.

The owner is an op for a target, a C++ extension, or a shared library.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

from opjit import backends
from opjit.backends.targets import Target
from opjit.errors import EntryError, OpjitError
from opjit.recipe.build_inputs import LIBRARY, entries_folder
from opjit.recipe.document import base_key, op_folder, request_key
from opjit.store import entry, inventory
from opjit.store import manifest as manifests
from opjit.store.inventory import EntryInfo
from opjit.store.manifest import Manifest
from opjit.store.store import PARTS, VERSION, Store

GOOD = "good"
BAD = "bad"


class Origin(NamedTuple):
    title: str  # the entry's name in messages
    folder: str  # of the entry and similar entries, below a store's root; in a remote, the directory of its objects
    key: str
    target: Target | None  # an op's target; None for a C++ extension
    pointers: tuple[str, ...]  # the names of the objects that point to it

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.key}.opjit"


def origin(manifest: Manifest) -> Origin:
    """Return the owner of a manifest's entry.

    Raises OpjitError if this process cannot identify it.
    """
    from opjit.library import origin as op_of  # which imports torch

    document = manifest.document
    target = None
    if document.get("made_by") == PARTS:
        folder, _, key = f"{VERSION}/{PARTS}/{document.get('name')}".rpartition("/")
        return Origin("a part of builds", folder, key, None, (f"{folder}/{key}.key",))
    if document.get("made_by") is None:
        schema, target = op_of(manifest)
        title = f"{schema.qualified} for {target}"
        place = op_folder(schema.qualified, target, document)
    else:
        kind = "library" if document["made_by"] == LIBRARY else "extension"
        place = entries_folder(document)
        title = f"the {kind} {document['name']}"
    folder = f"{VERSION}/{place}"
    # One pointer for the inputs that are known before a build, and one for these without compilers.
    keys = dict.fromkeys((base_key(document), request_key(document)))
    pointers = tuple(f"{folder}/{key}.key" for key in keys)
    return Origin(title, folder, manifest.key, target, pointers)


class Finding(NamedTuple):
    """The result of `verify` for an entry.

    Attributes:
        item: the entry.
        verdict: ``"good"`` or ``"bad"``.
        reason: why the entry is bad, or why it could be compared only in part.
    """

    item: EntryInfo
    verdict: str
    reason: str = ""


def verify_store(root: Store) -> Iterator[Finding]:
    for item in sorted(inventory.scan(root), key=lambda item: item.folder):
        try:
            yield Finding(item, GOOD, _verify_entry(root, item))
        except (OpjitError, OSError) as error:
            if os.path.lexists(item.folder):  # otherwise it was removed in the meantime
                yield Finding(item, BAD, str(error))


def _verify_entry(root: Store, item: EntryInfo) -> str:
    """Verify an entry.

    Returns a remark if a part cannot be compared here, for example because this process lacks the
    entry's backend.
    """
    manifest = manifests.read_manifest(item.folder)
    backend = manifest.document.get("backend")
    if isinstance(backend, str) and backends.by_name(backend) is None:
        entry.verify(item.folder, None)
        return f"only its bytes were compared: there is no backend {backend!r}; opjit.register_backend adds it"
    belongs = origin(manifest)
    if root.root / belongs.folder != item.folder.parent:
        raise EntryError(
            f"it is an entry of {belongs.title}, but it is in the directory of another op or target"
        )
    entry.verify(item.folder, belongs.target)
    return ""

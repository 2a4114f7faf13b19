"""Where an entry belongs, by its manifest: to an op for a target, to a C++ extension, or to a shared library."""

from typing import NamedTuple

from opjit.backends.targets import Target
from opjit.library import origin as op_of
from opjit.recipe.document import base_key, document_key
from opjit.share import remote
from opjit.shared_library.content import LIBRARY, entries_folder
from opjit.store.manifest import Manifest


class Origin(NamedTuple):
    title: str  # the entry's name in messages
    folder: str  # of the entry and others like it, below a store's root; in a remote the folder of its objects
    key: str
    target: Target | None  # an op's target; None for a C++ extension
    pointers: tuple[str, ...]  # the names of the objects that point to it
    most: int  # the number of keys that such an object holds at most

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.key}.opjit"


def of(manifest: Manifest) -> Origin:
    """Raise OpjitError if a manifest belongs to nothing that this process knows."""
    document = manifest.document
    if document.get("made_by") is None:
        schema, target = op_of(manifest)
        folder = remote.folder_name(schema.qualified, target)
        return Origin(f"{schema.qualified} for {target}", folder, manifest.key, target, (f"{folder}/{base_key(document)}.key",), 1)
    kind = "library" if document["made_by"] == LIBRARY else "extension"
    folder, known = f"v1/{entries_folder(document)}", {**document, "found": {}}  # see remote.py
    pointers = dict.fromkeys(f"{folder}/{key}.key" for key in (base_key(known), document_key(known)))
    return Origin(f"the {kind} {document['name']}", folder, manifest.key, None, tuple(pointers), remote.MOST_KEYS)

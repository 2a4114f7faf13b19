"""manifest.json: what an entry is. Written last, read strictly; an entry without a good one does not exist."""

import json
import re
from typing import Any, NamedTuple

from opjit.errors import EntryError
from opjit.recipe import FORMAT, document_key

NAME = "manifest.json"
MAX_BYTES = 1 << 20
_LONGEST = 30 * 86400.0  # seconds; a build that took longer is a slip of the pen
_LIBRARY = re.compile(r"\w[\w.]{0,250}", re.ASCII)  # a program that a C++ extension makes has no .so


class Manifest(NamedTuple):
    """An entry's description.

    Attributes:
        key: SHA-256 of `document`; also the entry's folder name.
        document: what the entry was built from (see Recipe.document).
        library: file name of the shared library, or of the program that a C++ extension makes.
        size, sha256: of the library.
        built_with: versions for people to read; nothing depends on them.
    """

    key: str
    document: dict[str, Any]
    library: str
    size: int
    sha256: str
    built_with: dict[str, str]

    @property
    def link(self) -> tuple[str, ...]:
        """The flags it was linked with.

        Raises:
            EntryError: the document has none.
        """
        flags = self.document.get("flags")
        link = flags.get("link") if isinstance(flags, dict) else None
        if not isinstance(link, list) or not all(isinstance(flag, str) for flag in link):
            raise EntryError("the manifest does not say what its library was linked with")
        return tuple(link)

    @property
    def seconds(self) -> float:
        """What the build took; 0 where that is not said."""
        try:
            seconds = float(self.built_with.get("seconds", 0))
        except (TypeError, ValueError):
            return 0.0
        return seconds if 0 <= seconds < _LONGEST else 0.0

    def dump(self) -> bytes:
        fields = {"format": FORMAT, **self._asdict()}
        return (json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of two values for one name, two readers might believe one each."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def parse(text: bytes) -> Manifest:
    """Read a manifest of this format.

    Raises:
        EntryError: it is damaged, of another format, or does not agree with itself.
    """
    try:
        fields = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise EntryError(f"the manifest is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise EntryError("the manifest is of another format")
    expected = {"format": int, "key": str, "document": dict, "library": str, "size": int, "sha256": str, "built_with": dict}
    if fields.keys() != expected.keys() or any(type(fields[name]) is not kind for name, kind in expected.items()):
        raise EntryError("the manifest does not have the fields of its format")
    del fields["format"]
    manifest = Manifest(**fields)
    if not _LIBRARY.fullmatch(manifest.library):
        raise EntryError("the manifest's library has no name that opjit gives one")
    try:
        if document_key(manifest.document) != manifest.key:
            raise EntryError("the manifest's key is not the key of its document")
    except (TypeError, ValueError, RecursionError) as error:
        raise EntryError(f"the manifest's document has no key: {error}") from None
    return manifest

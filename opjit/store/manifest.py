"""manifest.json: the description of an entry. It is written last and read strictly; without a valid one there is no entry."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files
from opjit.errors import EntryError
from opjit.recipe.document import FORMAT, document_key
from opjit.typed_json import typed

NAME = "manifest.json"
MAX_BYTES = 1 << 20


class AnotherFormat(EntryError):
    """An entry is of another version of opjit, which may share the store."""


class Manifest(NamedTuple):
    key: str
    document: dict[str, Any]
    library: str
    size: int
    sha256: str
    built_with: dict[str, str]

    @property
    def link(self) -> tuple[str, ...]:
        """The linker flags.

        Raises EntryError if the document lacks them.
        """
        flags = self.document.get("flags")
        link = flags.get("link") if isinstance(flags, dict) else None
        if not isinstance(link, list) or not all(isinstance(flag, str) for flag in link):
            raise EntryError("the manifest lacks linker flags")
        return tuple(link)

    def dump(self) -> bytes:
        fields = {"format": FORMAT, **self._asdict()}
        return (json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode(
            "ascii"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without duplicate names: two readers could each believe one of two values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def read_manifest(folder: Path, trusted_as: Path | None = None) -> Manifest:
    """Read the manifest of an entry. `trusted_as`: see files.trust_problem. Raises the errors of `parse`, and OSError."""
    return parse(files.read(folder / NAME, MAX_BYTES, trusted_as))


def parse(text: bytes) -> Manifest:
    """Parse a manifest. Raises AnotherFormat if it has another format, EntryError if it is damaged or contradicts itself."""
    try:
        fields = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise EntryError(f"the manifest is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise AnotherFormat("another version of opjit wrote it, in another format")
    del fields["format"]
    try:
        manifest: Manifest = typed(fields, Manifest)
    except TypeError as error:
        raise EntryError(f"the manifest does not have the fields of its format: {error}") from None
    if not re.fullmatch(r"\w[\w.]{0,250}", manifest.library, flags=re.ASCII):
        raise EntryError("the manifest's library has an invalid name")
    try:
        if document_key(manifest.document) != manifest.key:
            raise EntryError("the manifest's key is not its document's SHA-256")
    except (TypeError, ValueError, RecursionError) as error:
        raise EntryError(f"the manifest's document cannot be hashed: {error}") from None
    return manifest

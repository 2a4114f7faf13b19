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
        try:
            link: tuple[str, ...] = typed(self.document["flags"]["link"], tuple[str, ...])
        except (KeyError, TypeError):
            raise EntryError("the manifest lacks linker flags") from None
        return link

    def dump(self) -> bytes:
        fields = {"format": FORMAT, **self._asdict()}
        return f"{json.dumps(fields, sort_keys=True, indent=1)}\n".encode()


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
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise AnotherFormat("another version of opjit wrote it, in another format")
        del fields["format"]
        manifest: Manifest = typed(fields, Manifest)
        key = document_key(manifest.document)
    except (ValueError, TypeError, RecursionError) as error:
        raise EntryError(
            f"the manifest is not JSON with the fields of its format: {error}"
        ) from None
    if not re.fullmatch(r"\w[\w.]{0,250}", manifest.library, flags=re.ASCII):
        raise EntryError("the manifest's library has an invalid name")
    if key != manifest.key:
        raise EntryError("the manifest's key is not its document's SHA-256")
    return manifest

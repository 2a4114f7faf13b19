"""The document that describes a binary, and the key derived from it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 2  # increase it when the meaning of a document, or of an entry's files, changes


def document_key(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document in canonical JSON: sorted names, no spaces, ASCII."""
    return hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
    ).hexdigest()


def base_key(document: Mapping[str, Any]) -> str:
    """Return the key of a document without its compilers."""
    return document_key({**document, "toolchain": None})

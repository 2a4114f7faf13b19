"""The document that describes a binary, and the keys derived from it."""

import json
from collections.abc import Mapping
from typing import Any

from opjit import files
from opjit.backends.targets import Target

FORMAT = 5  # increase it when the meaning of a document, or of an entry's files, changes
_OF_BUILD: Mapping[str, Any] = {"inputs": {}, "absent": {}}  # reported only by a build
_OF_TOOLS: Mapping[str, Any] = {"toolchain": None}


def document_key(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document in canonical JSON: sorted names, no spaces, ASCII."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return files.sha256(text)


def request_key(document: Mapping[str, Any]) -> str:
    """Return the key of the part of a document that is known before a build."""
    return document_key({**document, **_OF_BUILD})


def base_key(document: Mapping[str, Any]) -> str:
    """Return the key of the part that is known before a build on a machine without compilers."""
    return document_key({**document, **_OF_BUILD, **_OF_TOOLS})


def op_folder(qualified: str, target: Target, document: Mapping[str, Any]) -> str:
    """Return the folder below the store's of the entries of an op and target that have a document's base key."""
    return f"{qualified.replace('::', '.')}/{target.folder}-{base_key(document)[:20]}"

"""library.json: what a library's folder holds. Its manifests vouch for the binaries, and library.json for the other files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files
from opjit.errors import EntryError

NAME = "library.json"
PYTHON, SHARED = "python", "libraries"  # folders
_FORMAT = 1
_MAX_BYTES = 1 << 20
_MAX_SHARED = 1 << 31


class Item(NamedTuple):
    """One op of a library.

    Attributes:
        folder: of its entry.
        key: of its binary.
        declared_in: the folder of its op.py in python/; None if no op.py declares it.
        before: shared libraries to open before its own, in order.
    """

    folder: str
    key: str
    declared_in: str | None
    before: tuple[str, ...] = ()


class Contents(NamedTuple):
    """What a library's folder holds.

    Attributes:
        ops: by qualified name.
        files: SHA-256 of each file that no manifest names, by its path in the folder.
    """

    ops: dict[str, Item]
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of all that the library holds."""
        document = {"format": _FORMAT, "ops": {name: item._asdict() for name, item in self.ops.items()}, "files": self.files}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def dump(self) -> bytes:
        ops = {name: item._asdict() for name, item in self.ops.items()}
        fields = {"format": _FORMAT, "ops": ops, "files": self.files, "sha256": self.digest}
        return (json.dumps(fields, sort_keys=True, indent=1) + "\n").encode("ascii")

    def declaration(self, folder: str) -> dict[str, str]:
        """SHA-256 of the Python files of a folder in python/, by their path in it."""
        start = f"{PYTHON}/{folder}/"
        return {path.removeprefix(start): digest for path, digest in self.files.items() if path.startswith(start)}


def parse(text: bytes) -> Contents:
    """Parse a library.json. Raises EntryError if it is damaged or has another format."""
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EntryError(f"its {NAME} is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise EntryError(f"its {NAME} has another format")
    try:
        ops = {name: Item(item["folder"], item["key"], item["declared_in"], tuple(item["before"])) for name, item in fields["ops"].items()}
        contents = Contents(ops, fields["files"])
        good = contents.digest == fields["sha256"]
    except (AttributeError, KeyError, TypeError):
        good = False
    if not good:
        raise EntryError(f"its {NAME} does not have the SHA-256 that it names")
    return contents


def read(root: Path) -> Contents:
    """Read a library's description. Raises FileNotFoundError if there is none, EntryError or OSError if it must not be used."""
    return parse(files.read(root / NAME, _MAX_BYTES))


def read_file(root: Path, path: str, contents: Contents) -> bytes:
    """Read one of the files that library.json vouches for. Raises EntryError or OSError if it must not be used."""
    try:
        content = files.read(root / path, _MAX_SHARED)
    except FileNotFoundError:
        raise EntryError(f"its file {path} is missing") from None
    if hashlib.sha256(content).hexdigest() != contents.files[path]:
        raise EntryError(f"{path} does not have the SHA-256 in its {NAME}")
    return content

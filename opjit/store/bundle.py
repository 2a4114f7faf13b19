"""An entry as one string of bytes, for a remote or another node: see FORMAT.md.

The manifest names the library's size and SHA-256, so its signature covers both. This module does
not trust the bytes: it does not parse JSON, and `Store.receive` checks every hash.
"""

import re
from pathlib import Path
from typing import NamedTuple

from opjit.errors import EntryError
from opjit.store import entry
from opjit.store import manifest as manifests

_HEADER = rb"opjit entry 1\n([1-9][0-9]{0,7}) (-|[0-9a-f]{128})\n"


class Bundle(NamedTuple):
    """An entry's bytes: manifest.json and the library as they are, and the manifest's Ed25519 signature; None if unsigned."""

    manifest: bytes
    library: bytes
    signature: bytes | None = None

    def dump(self) -> bytes:
        signature = self.signature.hex() if self.signature is not None else "-"
        return (
            f"opjit entry 1\n{len(self.manifest)} {signature}\n".encode()
            + self.manifest
            + self.library
        )


def parse_bundle(content: bytes, limit: int = manifests.MAX_BYTES) -> Bundle:
    """Split a bundle into its parts, without checking them. Raises EntryError if it is not a bundle, if its manifest has more than `limit`
    bytes, or if it was cut off before its library."""
    header = re.match(_HEADER, content)
    if header is None:
        raise EntryError("it does not start with the header of an opjit entry")
    length = int(header[1])
    if length > limit or len(content) <= header.end() + length:
        raise EntryError("it is shorter than the length in its header, or its manifest is too long")
    split = header.end() + length
    signature = None if header[2] == b"-" else bytes.fromhex(header[2].decode())
    return Bundle(content[header.end() : split], content[split:], signature)


def of(folder: Path) -> Bundle:
    """Return an entry's bytes, unsigned, after checking its owners, modes, size and hash. Raises the errors of `entry.read`."""
    manifest, library, _ = entry.read(folder)
    return Bundle(manifest.dump(), library)

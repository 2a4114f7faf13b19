"""An entry as one string of bytes, for places that keep or carry whole objects: a remote, a pack, another node.

    opjit entry 1\\n
    <length of the manifest, in digits> <signature of the manifest, 128 hex digits; or ->\\n
    <manifest.json><library>

The manifest names the library's size and SHA-256, so a signature of the manifest vouches for both. The glue and the build's
commands stay where the entry was built. What this module reads is not trusted: nothing of it is parsed as JSON here, and nothing
is believed before `Store.receive` has held it against its own hashes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from opjit import manifest, store
from opjit.errors import EntryError

_HEADER = re.compile(rb"opjit entry 1\n([1-9][0-9]{0,7}) (-|[0-9a-f]{128})\n")
MAX_BYTES = 1 << 30


class Bundle(NamedTuple):
    """An entry's bytes.

    Attributes:
        manifest: manifest.json, as it is in the entry.
        library: the shared library.
        signature: Ed25519, 64 bytes, of `manifest`; None for an unsigned one.
    """

    manifest: bytes
    library: bytes
    signature: bytes | None = None

    def dump(self) -> bytes:
        signature = self.signature.hex() if self.signature is not None else "-"
        return f"opjit entry 1\n{len(self.manifest)} {signature}\n".encode("ascii") + self.manifest + self.library


def parse(content: bytes) -> Bundle:
    """Take a bundle apart; whether its parts are any good is not looked at.

    Raises:
        EntryError: it is no bundle, or was cut off before its library.
    """
    header = _HEADER.match(content)
    if header is None:
        raise EntryError("it does not start as an entry of opjit's does")
    length = int(header[1])
    if length > manifest.MAX_BYTES or len(content) <= header.end() + length:
        raise EntryError("it is shorter than its first line says, or its manifest is longer than any")
    split = header.end() + length
    signature = None if header[2] == b"-" else bytes.fromhex(header[2].decode("ascii"))
    return Bundle(content[header.end():split], content[split:], signature)


def of(folder: Path) -> Bundle:
    """An entry's bytes, unsigned, after its owners, modes, size and hash were checked.

    Raises:
        FileNotFoundError: there is no such entry.
        EntryError, OSError: there is one, and it must not be used.
    """
    described, library = store.read(folder, unnoticed=True)
    return Bundle(described.dump(), library)

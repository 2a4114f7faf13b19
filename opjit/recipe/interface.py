"""The parts of a shared library that a linker uses: if two libraries have the same interface,
they give the same binary.
"""

import errno
import mmap
import os
import stat
import struct
from collections.abc import Iterator

from opjit import files

_DYNAMIC = 6
_SYMBOLS = 11  # types of sections
_VERSIONS = (0x6FFFFFFD, 0x6FFFFFFF)  # of definitions, and of symbols
_NEEDED = 1
_SONAME = 14  # tags of the dynamic section


def is_shared(path: str) -> bool:
    """Return whether a file is a shared library in ELF."""
    try:
        with open(path, "rb") as file:
            head = file.read(18)
    except OSError:
        return False
    return head.startswith(b"\x7fELF") and head[16:18] == b"\3\0"


def digest(path: str) -> str:
    """Return the SHA-256 of a shared library's soname, its needed libraries, and the names, kinds
    and versions of its symbols.

    Raises OSError.
    """
    with open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return files.sha256(b"".join(_parts(content)))
        except (struct.error, IndexError, ValueError) as error:
            text = f"it is not a readable shared library: {error}"
            raise OSError(errno.ENOEXEC, text, path) from None


def _parts(content: mmap.mmap) -> Iterator[bytes]:
    (offset,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    sections = [
        struct.unpack_from("<IIQQQQI", content, offset + size * number) for number in range(count)
    ]
    for _, kind, _, _, start, length, link in sections:
        part = content[start : start + length] if kind in (_DYNAMIC, _SYMBOLS, *_VERSIONS) else b""
        if kind == _SYMBOLS:
            _, _, _, _, names, names_length, _ = sections[link]
            yield content[names : names + names_length]
            for name, info, other, section in struct.iter_unpack("<IBBH16x", part):
                yield struct.pack("<IBB?", name, info, other, section)
        elif kind == _DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", part):
                yield struct.pack("<QQ", tag, value) if tag in (_NEEDED, _SONAME) else b""
        else:
            yield part

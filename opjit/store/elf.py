"""The libraries and architectures that a shared library needs, read from its ELF headers and
checked before every publication and every dlopen.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from opjit.errors import EntryError

MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's e_machine
_PT_LOAD = 1
_PT_DYNAMIC = 2
_NEEDED = 1
_STRTAB = 5
_RPATH = 15
_RUNPATH = 29
_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_FATBIN_CUBIN = 2
_ONLY_THIS_CHIP = 0x100000
_ONLY_THIS_FAMILY = 0x200000  # sm_90a, sm_100f


class Binary(NamedTuple):
    """The needed libraries of a shared library (DT_NEEDED), its DT_RUNPATH or DT_RPATH, and the
    archs with machine code in its CUDA fat binaries.
    """

    machine: str
    needed: frozenset[str]
    run_path: str | None
    cuda_archs: frozenset[str]


@contextmanager
def _reading() -> Iterator[None]:
    """Raise EntryError if a shared library is damaged."""
    try:
        yield
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise EntryError(f"the library is not a readable shared library: {error}") from None


def machine(content: bytes) -> str:
    """The machine of an ELF file: ``"x86_64"``, ``"aarch64"`` or ``"another machine"``. Raises
    EntryError if it is not an ELF file.
    """
    if content[:6] != b"\x7fELF\x02\x01" or len(content) < 64:
        raise EntryError("it is not a 64-bit little-endian ELF file")
    number = struct.unpack_from("<H", content, 18)[0]
    return next((name for name, code in MACHINES.items() if code == number), "another machine")


@_reading()
def without_run_path(content: bytes) -> bytes:
    """Return a shared library without an RPATH, which finds needed libraries only by the search
    path of the process.

    Raises EntryError if it is not a shared library.
    """
    places = _dynamic(content)
    tags = [content[at : at + 16] for at in places]
    rest = [tag for tag in tags if struct.unpack_from("<Q", tag)[0] not in (_RPATH, _RUNPATH)]
    table = b"".join(rest).ljust(16 * len(tags), b"\0")
    return content[: places.start] + table + content[places.stop :]


def _dynamic(content: bytes) -> range:
    for kind, start, _, length in _segments(content):
        if kind == _PT_DYNAMIC:
            return range(start, start + length // 16 * 16, 16)
    raise ValueError("no dynamic section")


def _segments(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    offset, size, count = (
        struct.unpack_from("<Q", content, 32)[0],
        *struct.unpack_from("<HH", content, 54),
    )
    for at in range(offset, offset + size * count, size):
        kind, _, start, address, _, length = struct.unpack_from("<IIQQQQ", content, at)
        yield kind, start, address, length


@_reading()
def inspect(content: bytes) -> Binary:
    """Read a 64-bit little-endian ELF shared library. Raises EntryError if it is something else, or damaged."""
    name = machine(content)
    if struct.unpack_from("<H", content, 16)[0] != 3:
        raise ValueError("not an ELF shared object")
    tags = [struct.unpack_from("<QQ", content, at) for at in _dynamic(content)]
    strings = dict(tags).get(_STRTAB, 0)
    base = next(
        (
            start + strings - address
            for kind, start, address, size in _segments(content)
            if kind == _PT_LOAD and address <= strings < address + size
        ),
        None,
    )
    if base is None:
        raise ValueError("no string table")

    def text(at: int) -> str:
        return content[base + at : content.index(b"\0", base + at)].decode("utf-8")

    needed = frozenset(text(value) for tag, value in tags if tag == _NEEDED)
    run_paths = {text(value) for tag, value in tags if tag in (_RPATH, _RUNPATH)}
    return Binary(
        name, needed, ":".join(sorted(run_paths)) or None, frozenset(_cuda_archs(content))
    )


def _cuda_archs(content: bytes) -> list[str]:
    """Walk the fat binaries: a header, then entries that each start with kind, header size, payload size and arch."""
    archs = []
    start = content.find(_FATBIN_MAGIC)
    while start >= 0:
        header_size, payload = struct.unpack_from("<HQ", content, start + 6)
        at = start + header_size
        end = min(start + header_size + payload, len(content) - 32)
        while at < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", content, at)
            if entry_header < 32:
                break  # the magic number was part of other data
            if kind == _FATBIN_CUBIN:
                number, features = struct.unpack_from("<I8xI", content, at + 28)
                archs.append(
                    f"sm_{number}{'a' if features & _ONLY_THIS_CHIP else 'f' if features & _ONLY_THIS_FAMILY else ''}"
                )
            at += entry_header + entry_size
        start = content.find(_FATBIN_MAGIC, start + 4)
    return archs


def names(link: Sequence[str]) -> frozenset[str]:
    """Return the libraries that linker flags declare, for `check_elf`: ``-lz``, ``-l:libz.so.1``, and the path of a shared library."""
    paths = (_link_name(flag.rpartition("/")[2]) for flag in link if not flag.startswith("-"))
    return frozenset({*(flag[2:] for flag in link if flag.startswith("-l")), *filter(None, paths)})


def _link_name(library: str) -> str | None:
    """``"z"`` for ``"libz.so.1"``; None for a path or another name that is not a library's."""
    found = re.fullmatch(r"lib([\w+.-]+?)\.so(\.\d+)*", library)
    return found[1] if found else None


def check_elf(
    content: bytes,
    machine: str,
    allowed: frozenset[str],
    cuda_archs: frozenset[str],
    declared: frozenset[str] = frozenset(),
) -> None:
    """Raise EntryError for a wrong machine, run path, CUDA arch, or a needed library neither `allowed` nor `declared` as ``"z"``."""
    found = inspect(content)
    if found.machine != machine:
        raise EntryError(f"the library is for {found.machine}, not {machine}")
    if found.run_path is not None:
        raise EntryError(
            f"the library has the RPATH {found.run_path!r}, where other users may put libraries"
        )
    extra = [
        name
        for name in sorted(found.needed - allowed)
        if _link_name(name) not in declared and f":{name}" not in declared
    ]
    by_path = next((name for name in extra if "/" in name), None)
    if by_path:
        raise EntryError(
            f"the library needs {by_path} at that path, because that library lacks a soname; link "
            "it with -Wl,-soname,"
            f"{by_path.rpartition('/')[2]}, or link its static archive"
        )
    if extra:
        raise EntryError(
            f"the library needs {', '.join(extra)}, which the op does not declare in extra_ldflags"
        )
    if not cuda_archs <= found.cuda_archs:
        raise EntryError(
            f"the library has CUDA code for {', '.join(sorted(found.cuda_archs)) or 'no arch'}, "
            f"not for {', '.join(sorted(cuda_archs))}"
        )

"""Stand-ins for torch's libraries: of a shared library, what a linker looks at, and no code.

Linking against the real ones takes ld 0.2 s and ties a build to the torch at hand. A stand-in has the name and the functions that
opjit_shim.h declares, so -z defs finds a misspelled or unsupported function when the op is linked. They are written here: a compiler
would make them in 10 ms, which the first build of all would wait for.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from opjit import binary, files, resources

_OF_CUDA = re.compile(r"cuda_(stream|caching|mm|addmm)")
_UNUSED = ("c10", "torch", "c10_cuda", "torch_cuda")  # named by torch's own link flags, needed by nobody
# The parts of a file in the order of their section headers, and each part's type, flags and the size of its entries.
_SECTIONS = {".text": (1, 6, 0), ".dynsym": (11, 2, 24), ".dynstr": (3, 2, 0), ".dynamic": (6, 3, 16), ".shstrtab": (3, 0, 0)}


def make(base: Path, triple: str, names: Iterable[str]) -> Path:
    """A folder with the stand-ins of some libraries, such as ``libtorch_cpu``, made once.

    Args:
        base: of the store that keeps it.
        triple: what the compiler compiles for, such as ``x86_64-linux-gnu``; its machine is one of `binary.MACHINES`.

    Raises:
        OSError: they cannot be written.
    """
    header = (resources.folder("kernels_c") / "opjit_shim.h").read_text()
    declared = sorted(set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", header)))
    folder = base / "stubs" / f"{triple}-{hashlib.sha256(header.encode()).hexdigest()[:16]}"
    wanted = {f"{name}.so": library(f"{name}.so", [f for f in declared if bool(_OF_CUDA.search(f)) == (name == "libtorch_cuda")],
                                    triple.partition("-")[0]) for name in names}
    missing = {name: content for name, content in wanted.items() if _content(folder / name) != content}
    if missing:
        files.make_private(folder)
        for name, content in {**{f"lib{unused}.a": b"!<arch>\n" for unused in _UNUSED}, **missing}.items():
            _appear(folder / name, content)
    return folder


def library(name: str, functions: Sequence[str], machine: str) -> bytes:
    """A 64-bit little-endian ELF shared library (System V ABI, chapters 4 and 5) that defines functions of no length.

    Args:
        name: its DT_SONAME.
        machine: ``"x86_64"`` or ``"aarch64"``.
    """
    strings = dict.fromkeys((name, *functions), 0)  # where each text begins
    at = 1
    for text in strings:
        strings[text] = at
        at += len(text) + 1
    symbols = [struct.pack("<IBBHQQ", strings[function], 0x12, 0, 1, 0, 0) for function in functions]  # global, a function, in .text
    parts = {".text": b"", ".dynsym": bytes(24) + b"".join(symbols), ".dynstr": _texts(strings), ".dynamic": bytes(6 * 16),
             ".shstrtab": _texts(_SECTIONS)}
    places, end = {}, 64 + 2 * 56
    for part, content in parts.items():
        places[part] = end
        end += -(-len(content) // 8) * 8
    tags = {14: strings[name], 5: places[".dynstr"], 6: places[".dynsym"], 10: len(parts[".dynstr"]), 11: 24, 0: 0}
    parts[".dynamic"] = b"".join(struct.pack("<QQ", *tag) for tag in tags.items())
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, binary.MACHINES[machine], 1, 0, 64, end, 0, 64, 56, 2, 64, 6, 5)
    segments = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, end, end, 4096) + struct.pack(
        "<IIQQQQQQ", 2, 4, *[places[".dynamic"]] * 3, *[len(parts[".dynamic"])] * 2, 8)
    body = b"".join(content + bytes(-len(content) % 8) for content in parts.values())
    return head + segments + body + bytes(64) + b"".join(_section(part, places[part], len(content)) for part, content in parts.items())


def _texts(texts: Iterable[str]) -> bytes:
    return b"\0" + b"".join(text.encode() + b"\0" for text in texts)


def _section(name: str, place: int, size: int) -> bytes:
    kind, flags, entry = _SECTIONS[name]
    strings = 3 if entry else 0  # symbols and tags name their texts in .dynstr
    return struct.pack("<IIQQQQIIQQ", _texts(_SECTIONS).index(name.encode()), kind, flags, place if flags else 0, place, size, strings,
                       1 if kind == 11 else 0, 8, entry)


def _content(path: Path) -> bytes | None:
    with suppress(OSError):
        return path.read_bytes()
    return None


def _appear(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{files.unique()}")
    files.write_synced(temporary, content)
    os.replace(temporary, path)

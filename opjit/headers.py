"""The files that a kernel is made of: its source and every header it can include, found without running a compiler."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include(?:_next)?[ \t]*(["<])([^">\n]+)[">]', re.MULTILINE)


def closure(roots: Iterable[Path], include_path: tuple[Path, ...]) -> dict[Path, str]:
    """The SHA-256 of the roots and of all that they include, by path.

    The scan is conservative: it follows every #include line, also one that a condition turns off. Quoted names are looked
    for beside the including file, then like angled ones on the include path; a name found nowhere is the compiler's or does
    not exist, and the compiler will say so.

    Raises:
        OSError: a file that is part of the op cannot be read.
    """
    digests: dict[Path, str] = {}
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in digests:
            continue
        content = path.read_bytes()
        digests[path] = hashlib.sha256(content).hexdigest()
        for kind, name in _INCLUDE.findall(content):
            beside = (path.parent,) if kind == b'"' else ()
            found = next((folder / os.fsdecode(name) for folder in (*beside, *include_path)
                          if (folder / os.fsdecode(name)).is_file()), None)
            if found is not None:
                waiting.append(Path(os.path.normpath(found)))
    return digests


def portable_name(path: Path, folder: Path, include: Path) -> str:
    """A file's name in a key: the same on every machine."""
    if path.is_relative_to(include) and not path.is_relative_to(folder):
        return f"<opjit>/{path.relative_to(include)}"
    return os.path.relpath(path, folder)


def read_dependencies(text: str) -> list[Path]:
    """The prerequisites in a compiler's make-style dependency file."""
    joined = text.replace("\\\n", " ").partition(": ")[2]
    names = re.split(r"(?<!\\)\s+", joined.strip())
    return [Path(name.replace("\\ ", " ").replace("$$", "$")) for name in names if name and not name.endswith(":")]

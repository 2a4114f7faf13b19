"""The files that a kernel is made of: its source and every header it can include, found without running a compiler."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_INCLUDE = re.compile(rb'#[ \t]*include(?:_next)?[ \t]*(["<])([^">\n]+)[">]')  # in a comment too: that costs nothing


def closure(roots: Iterable[str], include_path: tuple[str, ...]) -> dict[str, str]:
    """The SHA-256 of the roots and of all that they include, by path.

    The scan is conservative: it follows every #include line, also one that a condition turns off. Quoted names are looked
    for beside the including file, then like angled ones on the include path; a name found nowhere is the compiler's or does
    not exist, and the compiler will say so.

    Raises:
        OSError: a file that is part of the op cannot be read.
    """
    digests: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in digests:
            continue
        with open(path, "rb") as file:
            content = file.read()
        digests[path] = hashlib.sha256(content).hexdigest()
        waiting += included(content, os.path.dirname(path), include_path)
    return digests


def included(content: bytes, beside: str, include_path: tuple[str, ...]) -> Iterator[str]:
    """The files that a source's #include lines name, where they are found; `beside` is the folder that quoted names start from."""
    for kind, name in _INCLUDE.findall(content):
        candidates = (os.path.join(folder, os.fsdecode(name)) for folder in ((beside, *include_path) if kind == b'"' else include_path))
        found = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
        if found is not None:
            yield plain(found)


def plain(path: str) -> str:
    """A path without ``..`` for the same file: through a linked folder, ``..`` leads to where the link points."""
    normal = os.path.normpath(path)
    if ".." in path and not (os.path.exists(normal) and os.path.samefile(normal, path)):
        return os.path.realpath(path)
    return normal


def portable_name(path: str, folder: str, include: str, added: tuple[str, ...] = ()) -> str:
    """A file's name in a key: the same on every machine.

    Args:
        folder: of the op.
        include: of opjit's own headers.
        added: include folders of the op's author, who is not bound to keep them beside the op.
    """
    if path.startswith(folder + os.sep):
        return path[len(folder) + 1:]
    if path.startswith(include + os.sep):
        return f"<opjit>/{path[len(include) + 1:]}"
    for index, place in enumerate(added):
        if path.startswith(place + os.sep):
            return f"<include {index}>/{path[len(place) + 1:]}"
    return os.path.relpath(path, folder)


def place(name: str, folder: str, added: tuple[str, ...] = ()) -> str:
    """The path of a file that `portable_name` named, if it is not opjit's own."""
    kind, slash, rest = name.partition("/")
    numbered = re.fullmatch(r"<include (\d+)>", kind)
    return os.path.join(added[int(numbered[1])], rest) if slash and numbered else os.path.join(folder, name)


def read_dependencies(text: str) -> list[Path]:
    """The prerequisites in a compiler's make-style dependency file."""
    rules = text.replace("\\\n", " ").split("\n")
    names = [name for rule in rules for name in re.split(r"(?<!\\)\s+", rule.partition(": ")[2].strip())]
    return [Path(re.sub(r"\\([ #:])", r"\1", name).replace("$$", "$")) for name in names if name]

"""The files that a kernel is made of: its source and every header it can include, found without running a compiler."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from opjit import files

_INCLUDE = re.compile(rb'#[ \t]*include(?:_next)?[ \t]*(["<])([^">\n]+)[">]')  # in a comment too: that costs nothing
_UNREAD = "cannot be read"


class Scan:
    """What scans at one moment have in common: a file is read once, and looked for once, however many ops include it."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[str, list[tuple[bytes, bytes]]]] = {}
        self._there: dict[str, bool] = {}
        self.closures: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, str]] = {}  # an op's archs have theirs in common

    def read(self, path: str) -> tuple[str, list[tuple[bytes, bytes]]]:
        """A file's SHA-256, and its #include lines: the kind of quote, and the name.

        Raises:
            OSError: it cannot be read.
        """
        known = self._read.get(path)
        if known is None:
            with open(path, "rb") as file:
                content = file.read()
            known = self._read[path] = hashlib.sha256(content).hexdigest(), _INCLUDE.findall(content)
        return known

    def find(self, kind: bytes, name: bytes, beside: str, include_path: tuple[str, ...]) -> str | None:
        """The file that an #include line means, or None."""
        for folder in (beside, *include_path) if kind == b'"' else include_path:
            candidate = os.path.join(folder, os.fsdecode(name))
            there = self._there.get(candidate)
            if there is None:
                there = self._there[candidate] = os.path.isfile(candidate)
            if there:
                return plain(candidate)
        return None


def closure(roots: Iterable[str], include_path: tuple[str, ...], scan: Scan | None = None) -> dict[str, str]:
    """The SHA-256 of the roots and of all that they include, by path.

    A file that is there and cannot be read gets, instead of a digest, a text that says so and is never the same again: so no key
    that it enters is ever found, or shared (see `unread`).

    The scan is conservative: it follows every #include line, also one that a condition turns off. Quoted names are looked
    for beside the including file, then like angled ones on the include path; a name found nowhere is the compiler's or does
    not exist, and the compiler will say so.

    Args:
        scan: what other scans of this moment found out.

    Raises:
        FileNotFoundError: a root is not there.
    """
    scan, waiting = scan or Scan(), list(roots)
    asked = tuple(waiting), include_path
    known = scan.closures.get(asked)
    if known is not None:
        return known
    digests: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        if path in digests:
            continue
        try:
            digests[path], lines = scan.read(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            digests[path] = f"{_UNREAD} ({error.strerror}) {files.unique()}"
            continue
        beside = os.path.dirname(path)
        waiting += (found for kind, name in lines if (found := scan.find(kind, name, beside, include_path)) is not None)
    scan.closures[asked] = digests
    return digests


def unread(inputs: Mapping[str, str]) -> str | None:
    """Which of the files could not be read, in words; None if all were."""
    found = [f"{name} {digest.rpartition(' ')[0]}" for name, digest in inputs.items() if digest.startswith(_UNREAD)]
    return ", ".join(found) or None


def included(content: bytes, beside: str, include_path: tuple[str, ...]) -> Iterator[str]:
    """The files that a source's #include lines name, where they are found; `beside` is the folder that quoted names start from."""
    scan = Scan()
    for kind, name in _INCLUDE.findall(content):
        found = scan.find(kind, name, beside, include_path)
        if found is not None:
            yield found


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

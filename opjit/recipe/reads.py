"""The files that a build read and the paths that it searched without success: the part of a key
that only the tools can report.

An entry's document lists each file that the preprocessor, the assembler and the linker report, by a portable name with a digest, and each
absence: a path that was searched before and named no file. A look-up compares both. Signatures from
stat are kept for each entry, so that files are not read again unless they changed since the last
comparison.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files, resources
from opjit.errors import EntryError
from opjit.recipe import interface

GENERATED = "/<generated>/"  # the folder of texts that exist only in a build
INLINE = "/<inline>/"  # the same, of sources that the document lists elsewhere
_SHARED = "interface "  # the start of the digest of a shared library, because a linker uses only its names
_SETTLED = 2 * 10**9  # nanoseconds after which a later write gives a file another signature
_MANY = 32  # so many files are worth a note
_KINDS = ("include", "library", "system", "own")  # of folders, in the order of the look-up
_NUMBERED = re.compile(rf"<({'|'.join(_KINDS)}) (\d+)>")
_ROOTS = ("/usr/", "/lib", "/opt/")  # a path below them has the same meaning on other machines


class Places(NamedTuple):
    """Folders that give files names which are the same on every machine, and back."""

    folder: str  # of the first source; a plain relative name starts there
    include: tuple[str, ...] = ()  # folders of headers in the flags
    library: tuple[str, ...] = ()  # folders of libraries
    system: tuple[str, ...] = ()  # the compilers' folders; empty without a compiler
    own: tuple[
        str, ...
    ] = ()  # folders of torch and Python, with files that are covered by a version

    def name(self, path: str) -> str:
        """Return the portable name of an absolute path without ``..``."""
        if f"{path}/".startswith((GENERATED, INLINE)):
            return path[1:]
        if path == self.folder:
            return "."
        folder = self.folder.rstrip(os.sep) + os.sep
        if path.startswith(folder):
            return path[len(folder) :]
        for kind, folder in self._numbered():
            if path == folder:
                return kind
            if path.startswith(folder + os.sep):
                return kind + path[len(folder) :]
        if path.startswith(_ROOTS):
            return f"<root>{path}"
        return os.path.relpath(path, self.folder)

    def path(self, name: str) -> str | None:
        """Return the path of a portable name; None if it is a file of the system that compiled, and no compiler is here. Raises
        EntryError if it is in a folder that the request does not name."""
        kind, _, rest = name.partition("/")
        if kind in ("<generated>", "<inline>"):
            return f"/{name}"
        if kind == "<root>":
            return f"/{rest}" if self.system else None
        if kind == "<opjit>":
            return os.path.join(_ours(), rest)
        numbered = _NUMBERED.fullmatch(kind)
        if numbered is None:
            return os.path.normpath(os.path.join(self.folder, name))
        of_kind: tuple[str, ...] = getattr(self, numbered[1])
        if numbered[1] == "system" and not of_kind:
            return None
        if int(numbered[2]) >= len(of_kind):
            raise EntryError(f"its manifest names {name}, which is in no directory of the request")
        return os.path.join(of_kind[int(numbered[2])], rest)

    def _numbered(self) -> Iterator[tuple[str, str]]:
        yield "<opjit>", _ours()
        for kind in _KINDS:
            for index, folder in enumerate(getattr(self, kind)):
                yield f"<{kind} {index}>", folder


def _ours() -> str:
    return resources.include_path()


class Reads(NamedTuple):
    """The reads of a build, by absolute paths: a digest for each file, and the paths without a
    file.
    """

    digests: Mapping[str, str]
    absent: frozenset[str]
    doubt: str = ""  # why that may not be all, so that the binary is not cached

    def document(self, places: Places) -> dict[str, Any]:
        """Return the fields of an entry's document."""
        inputs = {places.name(path): digest for path, digest in self.digests.items()}
        absent = dict[str, list[str]]()
        for path in sorted(self.absent):
            folder, name = os.path.split(path.rstrip(os.sep))
            absent.setdefault(places.name(folder), []).append(name + os.sep * path.endswith(os.sep))
        return {"inputs": dict(sorted(inputs.items())), "absent": absent}

    def joined(self, other: Reads) -> Reads:
        digests = {**self.digests, **other.digests}
        return Reads(digests, self.absent | other.absent, self.doubt or other.doubt)


NOTHING = Reads({}, frozenset())


def loaded(document: Mapping[str, Any], places: Places) -> Reads:
    """Return what `Reads.document` described."""
    digests = {places.path(name) or "": digest for name, digest in document["inputs"].items()}
    absent = {
        os.path.join(places.path(folder) or "", name)
        for folder, names in document["absent"].items()
        for name in names
    }
    return Reads(digests, frozenset(absent))


class Moment:
    """The files as they are during one request: each is read and searched for at most once."""

    def __init__(self, texts: Mapping[str, bytes] | None = None) -> None:
        self.texts = dict(texts or {})  # files that need not be on disk, by path
        self._digests = dict[tuple[str, bool], str]()

    def digest(self, path: str, shared: bool = False) -> str:
        """Return a file's SHA-256 or, for a shared library, the SHA-256 of its interface.

        Raises OSError.
        """
        request = (path, shared)
        if request not in self._digests:
            self._digests[request] = self._digest(path, shared)
        return self._digests[request]

    def _digest(self, path: str, shared: bool) -> str:
        if path in self.texts:
            return files.sha256(self.texts[path])
        return _SHARED + interface.digest(path) if shared else files.digest(path)

    def text(self, path: str) -> bytes:
        """Return a file's content. Raises OSError."""
        return self.texts[path] if path in self.texts else files.read_regular(path)

    def exists(self, path: str) -> bool:
        """Return whether a path exists.

        If it ends with a slash, return whether it is anything except the folder that a build found
        there.
        """
        if f"{path}/".startswith((GENERATED, INLINE)):
            return path in self.texts or any(each.startswith(f"{path}/") for each in self.texts)
        if path.endswith(os.sep):
            return os.path.exists(path[:-1]) and not os.path.isdir(path)
        return os.access(path, os.F_OK)


def signature(path: str) -> list[int] | None:
    """Return numbers that change with a file, or None if the file does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino]


def changes(
    document: Mapping[str, Any], places: Places, moment: Moment, note: Path | None = None
) -> Iterator[str]:
    """Yield the differences between the files now and the files that an entry's document lists.

    `note` keeps signatures, which a look-up that had to compare contents renews. Raises EntryError
    if the document does not list them.
    """
    inputs = document.get("inputs")
    absent = document.get("absent")
    if not isinstance(inputs, dict) or not isinstance(absent, dict):
        raise EntryError("its manifest does not list the files that its build read")
    kept = _noted(note, places)
    known = kept.signatures
    as_noted = bool(known) and all(signature(path) == known[path] for path in known)
    if as_noted:
        inputs = {name: inputs[name] for name in kept.inputs}
        absent = kept.absent
    begun = time.time_ns()
    same = True
    for text in itertools.chain(
        _appeared(absent, places, moment),
        _changed_files(inputs, places, moment, known),
    ):
        same = False
        yield text
    if same and not as_noted and (known or len(inputs) > _MANY):
        remember(document, places, note, begun)


def _appeared(absent: Mapping[str, Any], places: Places, moment: Moment) -> Iterator[str]:
    for folder, names in absent.items():
        place = places.path(folder)
        for name in names if place is not None else ():
            if moment.exists(os.path.join(place or "", name)):
                yield f"{folder}/{name} has appeared"


def _changed_files(
    inputs: Mapping[str, str], places: Places, moment: Moment, kept: Mapping[str, Any]
) -> Iterator[str]:
    for name, digest in inputs.items():
        path = places.path(name)
        if path is None:
            continue
        now = signature(path)
        if now is not None and kept.get(path) == now:
            continue
        try:
            same = moment.digest(path, digest.startswith(_SHARED)) == digest
        except OSError:
            same = False
        if not same:
            yield f"{name} {'changed' if now or path in moment.texts else 'is gone'}"


class _Noted(NamedTuple):
    """A note on files at some places."""

    places: list[object]
    # Signatures by path. The signature of a folder covers all names that it lacks.
    signatures: Mapping[str, Any]
    inputs: list[str]  # the names of files that were too new for a signature
    absent: Mapping[str, list[str]]  # names that the signature of a folder does not cover


def _noted(note: Path | None, places: Places) -> _Noted:
    """Return the content of a note, or nothing if it is about files at other paths."""
    kept = files.read_checked(note) if note is not None else None
    if not isinstance(kept, dict) or kept.get("places") != _as_json(places):
        return _Noted([], {}, [], {})
    return _Noted(**kept)


def _as_json(places: Places) -> list[object]:
    return [_ours(), *(each if isinstance(each, str) else list(each) for each in places)]


def remember(document: Mapping[str, Any], places: Places, note: Path | None, before: int) -> None:
    """Note the signatures of files and folders that were compared or read after a time `before`, if nothing changed since then.

    If a file is not older than the clock's resolution, each look-up compares it.
    """
    if note is None:
        return
    settled = min(before, time.time_ns() - _SETTLED)
    signatures = {}
    inputs = []
    absent = {}
    for name in document["inputs"]:
        path = places.path(name)
        now = signature(path) if path is not None else None
        if path is not None and now is not None and now[1] < settled:
            signatures[path] = now
        elif path is not None:
            inputs.append(name)
    for folder, names in document["absent"].items():
        place = places.path(folder)
        now = signature(place) if place is not None else None
        if place is None:
            continue
        links = any(os.path.islink(os.path.join(place, name)) for name in names)
        if now is None or now[1] >= settled or links:
            absent[folder] = names
        else:
            signatures[place] = now
    found = _Noted(_as_json(places), signatures, inputs, absent)
    files.write_checked(note, found._asdict())


def normalized(path: str) -> str:
    """Return a path to the same file without ``..``, which after a symbolic link leads to the parent of the link's target."""
    normal = os.path.normpath(path)
    if ".." in path and os.path.realpath(normal) != os.path.realpath(path):
        return os.path.realpath(path)
    return normal


def read_dependencies(text: str) -> list[str]:
    """Return the prerequisites in a tool's dependency file (make syntax)."""
    rules = text.replace("\\\n", " ").split("\n")
    names = [
        name for rule in rules for name in re.split(r"(?<!\\)\s+", rule.partition(": ")[2].strip())
    ]
    return [re.sub(r"\\+(?=[ #:])", _half, name).replace("$$", "$") for name in names if name]


def _half(slashes: re.Match[str]) -> str:
    """Return the escaped backslashes before a blank: each is written twice, and the blank has
    one more.
    """
    return slashes[0][: len(slashes[0]) // 2]


def listed(listings: Iterable[Path]) -> list[str]:
    """Return what dependency files list, each path once, in order."""
    texts = (each.read_text("utf-8", "surrogateescape") for each in listings)
    return list(dict.fromkeys(path for text in texts for path in read_dependencies(text)))


def listed_absolute(listings: Iterable[Path]) -> list[str]:
    """Return what dependency files list, in order. Relative paths start in the folder of the file."""
    return [os.path.join(each.parent, path) for each in listings for path in listed([each])]


def digest_of(value: object) -> str:
    """Return the SHA-256 of a value in JSON."""
    return files.sha256(json.dumps(value, sort_keys=True))

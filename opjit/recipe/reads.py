"""The files that a build read and the paths that it searched without success: the part of a key that only the tools can report.

The recorder (see `recorder`) writes down the questions of the tools. An entry's document lists each file that they read, by a portable
name with a digest, and each absence: a path that they looked for in vain. A look-up compares both. A note for each entry and machine also
has the programs that ran, and signatures from stat, so that files are not read again unless they changed since the last comparison.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files, resources
from opjit.errors import EntryError

GENERATED = "/<generated>/"  # the folder of texts that exist only in a build
INLINE = "/<inline>/"  # the same, of sources that the document lists elsewhere
SEARCHED = "/<path>/"  # the "folder" of names that PATH leads to programs
REAL = "/<real>/"  # the start of a folder, in the place of its digest the path behind its links
VARIABLE = "/<variable>/"  # the "folder" of environment variables that a tool asked for
DATE = "/<date>/"  # the start of a file, in the place of its digest the time of its last change
CWD = "/<cwd>"  # in the place of a path, and the working folder in the place of its digest
_UNREAL = (DATE, GENERATED, INLINE, REAL, SEARCHED, VARIABLE)
_SETTLED = 2 * 10**9  # nanoseconds after which a later write gives a file another signature
_KINDS = ("include", "library", "system", "own")  # of folders, in the order of the look-up
_NUMBERED = rf"<({'|'.join(_KINDS)}) (\d+)>"
_OF_LIBC = r"(?:libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so|ld-linux|ld64"
_ROOTS = (
    "/usr/",
    "/lib/",
    "/lib64/",
    "/opt/",
)  # a path below them has the same meaning on other machines


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
        if path.startswith(DATE):
            return f"<date>/{self.name(path.removeprefix(DATE))}"
        if path == CWD or f"{path}/".startswith(_UNREAL):
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
        if f"{path}/".startswith(_ROOTS):
            return f"<root>{path}"
        return os.path.relpath(path, self.folder)

    def path(self, name: str) -> str | None:
        """Return the path of a portable name; None if it is a file of the system that compiled, and no compiler is here. Raises
        EntryError if it is in a folder that the request does not name."""
        kind, _, rest = name.partition("/")
        if kind in ("<cwd>", "<generated>", "<inline>", "<path>", "<real>"):
            return f"/{name}"
        if kind == "<date>":
            dated = self.path(rest)
            return None if dated is None else DATE + dated
        if kind == "<variable>":
            return f"/{name}" if self.system else None
        if kind == "<program>":
            return None
        if kind == "<root>":
            return f"/{rest}" if self.system else None
        if kind == "<opjit>":
            return os.path.join(_ours(), rest)
        numbered = re.fullmatch(_NUMBERED, kind)
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


EVERYWHERE = Places(os.sep, system=(os.sep,))  # names all files by their paths on this machine


def _ours() -> str:
    return resources.include_path()


def trusted_prefixes(folders: Iterable[str], system: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of real paths of files that are covered by a version in the key, but
    not of a folder with files of the system.
    """
    real = dict.fromkeys(os.path.realpath(folder) for folder in folders if folder)
    known = [f"{each}/" for each in system]
    return tuple(
        f"{folder}/" for folder in real if not any(each.startswith(f"{folder}/") for each in known)
    )


class Reads(NamedTuple):
    """The reads of a build, by absolute paths: a digest for each file, and the paths without a file."""

    digests: Mapping[str, str]
    absent: Sequence[str]  # each once
    doubt: str = ""  # why that may not be all, so that the binary is not cached
    # The same of this machine only: programs, the names in folders, and the folders that PATH lists.
    local: Mapping[str, str] = {}
    local_absent: Sequence[str] = ()

    def document(self, places: Places) -> dict[str, Any]:
        """Return the fields of an entry's document."""
        inputs = {
            places.name(path): places.name(digest) if path == CWD else digest
            for path, digest in self.digests.items()
        }
        # Programs by their names, so that they are part of the key, and not compared on other machines.
        for path, digest in self.local.items():
            name = os.path.basename(path.rstrip(os.sep))
            if not path.startswith((REAL, SEARCHED)) and not re.match(_OF_LIBC, name):
                inputs[f"<program>/{name}"] = digest
        absent = dict[str, list[str]]()
        for path in sorted(self.absent):
            folder, name = os.path.split(path.rstrip(os.sep))
            absent.setdefault(places.name(folder), []).append(name + os.sep * path.endswith(os.sep))
        return {"inputs": dict(sorted(inputs.items())), "absent": absent}

    def joined(self, other: Reads) -> Reads:
        digests = {**self.digests, **other.digests}
        absent = sorted({*self.absent, *other.absent})
        local = {**self.local, **other.local}
        local_absent = sorted({*self.local_absent, *other.local_absent})
        return Reads(digests, absent, self.doubt or other.doubt, local, local_absent)

    def here(self) -> Reads:
        """Return the same with all that only this machine can compare."""
        absent = sorted({*self.absent, *self.local_absent})
        return Reads({**self.digests, **self.local}, absent)


NOTHING = Reads({}, ())


def loaded(document: Mapping[str, Any], places: Places) -> Reads:
    """Return what `Reads.document` described, as far as this machine has it."""
    digests = {
        path: (places.path(digest) or "") if path == CWD else digest
        for name, digest in document["inputs"].items()
        if (path := places.path(name)) is not None
    }
    absent = [
        os.path.join(place, name)
        for folder, names in document["absent"].items()
        if (place := places.path(folder)) is not None
        for name in names
    ]
    return Reads(digests, absent)


# A file's SHA-256, computed once for a signature, which a later write changes: each build reads the compiler's libraries.
_digest_at = functools.cache(lambda path, *signature: files.digest(path))


class Moment:
    """The files as they are during one request: each is read and searched for at most once."""

    def __init__(self, texts: Mapping[str, bytes] | None = None) -> None:
        self.texts = dict(texts or {})  # files that need not be on disk, by path
        self._digests = dict[str, str]()

    def digest(self, path: str) -> str:
        """Return a file's SHA-256, and for a folder (``"/a/"``) the SHA-256 of its names. Raises OSError."""
        if path not in self._digests:
            self._digests[path] = self._digest(path)
        return self._digests[path]

    def _digest(self, path: str) -> str:
        if path in self.texts:
            return files.sha256(self.texts[path])
        if path.startswith(VARIABLE):
            return files.sha256(os.fsencode(os.environ.get(path.removeprefix(VARIABLE), "")))
        if path.startswith(DATE):
            return str(os.stat(path.removeprefix(DATE)).st_mtime_ns)
        if path == CWD:
            return os.getcwd()
        if path.startswith(SEARCHED):
            return shutil.which(path.removeprefix(SEARCHED)) or ""
        if path.startswith(REAL):
            folder = path.removeprefix(REAL)
            return os.path.realpath(folder) if os.path.lexists(folder) else ""
        if path.endswith(os.sep):
            return digest_of(sorted(os.listdir(path)))
        now = signature(path)
        if now and now[1] < time.time_ns() - _SETTLED:
            return _digest_at(path, *now)
        return files.digest(path)

    def exists(self, path: str) -> bool:
        """Return whether a path exists.

        If it ends with a slash, return whether it is anything except the folder that a build found
        there.
        """
        if f"{path}/".startswith(_UNREAL):
            return path in self.texts or any(each.startswith(f"{path}/") for each in self.texts)
        if path.endswith(os.sep):
            return os.path.exists(path[:-1]) and not os.path.isdir(path)
        return os.access(path, os.F_OK)


def recorded_signature(status: os.stat_result) -> str:
    """Return a file's signature in the form of the recorder."""
    if not stat.S_ISREG(status.st_mode):
        return ""
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, numbers))


def signature(path: str) -> list[int] | None:
    """Return numbers that change with a file, or None if the file does not exist, or if its file system keeps no times."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    numbers = [status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino]
    return numbers if status.st_ctime_ns else None


def changes(
    document: Mapping[str, Any], places: Places, moment: Moment, note: Path | None = None
) -> Iterator[str]:
    """Yield the differences between the files now and the files that an entry's document lists.

    `note` has the programs of this machine as well, and signatures, which a look-up that had to compare contents renews. Raises
    EntryError if the document does not list the files.
    """
    if not isinstance(document.get("inputs"), dict) or not isinstance(document.get("absent"), dict):
        raise EntryError("its manifest does not list the files that its build read")
    read, known = _noted(note, places) or (loaded(document, places), {})
    yield from _changes_of(read, known, places, moment, note)


def differences(read: Reads, moment: Moment, note: Path | None = None) -> Iterator[str]:
    """Yield the differences between the files now and what the tools of a build read on this machine. `note` is as for `changes`."""
    found = read.here()
    kept = _noted(note, EVERYWHERE)
    known = kept[1] if kept and kept[0] == found else {}
    yield from _changes_of(found, known, EVERYWHERE, moment, note)


def is_unchanged(note: Path) -> bool:
    """Return whether nothing changed since a note on reads under absolute paths."""
    kept = _noted(note, EVERYWHERE)
    return kept is not None and not any(_changes_of(*kept, EVERYWHERE, Moment(), note))


def _changes_of(
    found: Reads, known: Mapping[str, Any], places: Places, moment: Moment, note: Path | None
) -> Iterator[str]:
    """Yield the differences to reads, of which the signatures of some are known. Without one, renew the note if signatures have changed."""
    begun = time.time_ns()
    current = {path for path, each in known.items() if signature(path) == each}
    same = True
    for path, digest in found.digests.items():
        text = "" if path in current else _change(path, digest, places, moment)
        if text:
            same = False
            yield text
    for path in found.absent:
        covered = os.path.dirname(path) in current and not path.endswith(os.sep)
        if not covered and moment.exists(path):
            same = False
            yield f"{places.name(path)} has appeared"
    settled = begun - _SETTLED
    unsigned = [each for path in found.digests.keys() - known.keys() if (each := signature(path))]
    if same and (len(current) < len(known) or any(each[1] < settled for each in unsigned)):
        remember(found, places, note, begun)


def _change(path: str, digest: str, places: Places, moment: Moment) -> str:
    """Describe the change of a file that has another digest now; an empty text without one."""
    with suppress(OSError):
        if moment.digest(path) == digest:
            return ""
    there = (
        path in moment.texts
        or path == CWD
        or path.startswith((DATE, REAL, SEARCHED, VARIABLE))
        or os.path.exists(path)
    )
    return f"{places.name(path)} {'changed' if there else 'is gone'}"


def _noted(note: Path | None, places: Places) -> tuple[Reads, Mapping[str, Any]] | None:
    """Return the reads in a note and their signatures by path, or None if it is about files at other paths.

    The signature of a folder covers all names that it lacks.
    """
    kept = files.read_checked(note)
    if not isinstance(kept, dict) or kept.get("places") != _as_json(places):
        return None
    return Reads(kept["digests"], kept["absent"]), kept["signatures"]


def _as_json(places: Places) -> list[object]:
    return [_ours(), *(each if isinstance(each, str) else list(each) for each in places)]


def remember(read: Reads, places: Places, note: Path | None, before: int) -> None:
    """Note the reads of a build, with the signatures of files and folders that were compared or read after a time `before`.

    If a file is not older than the clock's resolution, each look-up compares it.
    """
    if note is None:
        return
    found = read.here()
    settled = min(before, time.time_ns() - _SETTLED)
    folders = {os.path.dirname(path) for path in found.absent if not path.endswith(os.sep)}
    linked = {os.path.dirname(path) for path in found.absent if os.path.islink(path)}
    signatures = {}
    for path in (*found.digests, *(folders - linked)):
        now = signature(path)
        if now is not None and now[1] < settled:
            signatures[path] = now
    content = {
        "places": _as_json(places),
        "digests": found.digests,
        "absent": found.absent,
        "signatures": signatures,
    }
    files.write_checked(note, content)


def normalized(path: str) -> str:
    """Return a path to the same file without ``..``, which after a symbolic link leads to the parent of the link's target."""
    normal = os.path.normpath(path)
    if ".." in path and os.path.realpath(normal) != os.path.realpath(path):
        return os.path.realpath(path)
    return normal


def digest_of(value: object) -> str:
    """Return the SHA-256 of a value in JSON."""
    return files.sha256(json.dumps(value, sort_keys=True))

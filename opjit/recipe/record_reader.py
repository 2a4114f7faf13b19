"""From the record of a build's tools to its reads: what they opened, with digests, and what they looked for in vain."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from opjit.recipe import compilers, recorder
from opjit.recipe.reads import (
    CWD,
    DATE,
    GENERATED,
    REAL,
    SEARCHED,
    VARIABLE,
    Moment,
    Reads,
    recorded_signature,
)
from opjit.recipe.recorder import Record

_NAMED = r"\$\{?([A-Za-z_]\w*)"  # a variable in a shell's script


class Changed(Exception):
    """A file changed while tools may have read it. The message is its path."""


@dataclass(frozen=True)
class RecordReader:
    """Turn records into reads, before the folder `work` of a build is gone.

    Attributes:
        moment: has the texts of the build.
        trusted: prefixes of real paths of files that a version in the key covers.
        started: a time of `files.tick` before the tools ran.
        sources: files that the tools must have opened, or else they cannot be watched.
    """

    work: str
    moment: Moment
    trusted: tuple[str, ...]
    started: int
    sources: tuple[str, ...] = ()
    _real: dict[str, str] = field(default_factory=dict)

    def reads(self, logs: Iterable[Path]) -> Reads:
        """Return the reads in some files. Raises Changed."""
        return self.reads_in(recorder.read(logs, self.work))

    def reads_in(self, record: Record) -> Reads:
        """Return the reads in a record of tools that ran in the folder `work`. Raises Changed."""
        if record.unsteady and self._path(record.unsteady, record) is not None:
            raise Changed(record.unsteady)
        opened = {**self._examined(record), **record.opened}
        digests = dict[str, str]()
        local = self._local(record)
        asked = set(record.variables)
        for raw, signature in opened.items():
            path = self._path(raw, record)
            if path is None or path in digests:
                continue
            script = _script(path, record.openers.get(raw, set()))
            kind = digests if script is None else local
            kind[path] = self._digest(path, signature)
            asked |= {*re.findall(_NAMED, script or "")}
        for path in [*_copies(digests)]:
            digests[DATE + path] = self.moment.digest(DATE + path)
        for name in asked - compilers.NEUTRAL.keys():
            if not recorder.PASSED.fullmatch(name):
                digests[VARIABLE + name] = self.moment.digest(VARIABLE + name)
        if self._paths(record.relative, record):
            digests[CWD] = self.moment.digest(CWD)
        searched = tuple(f"{os.path.normpath(each)}/" for each in os.get_exec_path())
        of_path = {raw for raw in record.missing if raw.startswith(searched)}
        for name in record.executed | {os.path.basename(raw) for raw in of_path}:
            local[SEARCHED + name] = self.moment.digest(SEARCHED + name)
        tried = record.tried & record.missing
        absent = self._absences(record.missing - of_path - tried, record)
        absent |= {path.rstrip(os.sep) + os.sep for path in self._paths(record.folders, record)}
        return Reads(
            digests,
            sorted(absent),
            self._doubt(record),
            local,
            sorted(self._absences(tried - of_path, record)),
        )

    def _paths(self, raws: Iterable[str], record: Record) -> set[str]:
        found = (self._path(raw, record) for raw in raws)
        return {path for path in found if path is not None}

    def _doubt(self, record: Record) -> str:
        opened = {os.path.normpath(raw) for raw in record.opened}
        unseen = [source for source in self.sources if os.path.normpath(source) not in opened]
        if unseen:
            return f"the tool that compiles {unseen[0]} cannot be watched"
        if self._paths(record.dated, record) or record.dated & {*self.sources}:
            return "it uses __DATE__, __TIME__ or __TIMESTAMP__"
        return ""

    def _path(self, raw: str, record: Record) -> str | None:
        """Return the path by which a file is recorded.

        None for a file of this build or the kernel, and for a file that is covered by a version in the key.
        """
        generated = f"{self.work}/generated/"
        if raw.startswith(generated):
            return GENERATED + os.path.normpath(raw[len(generated) :])
        if _of_kernel(raw) or (raw in record.written and not self._is_unchanged(raw, record)):
            return None
        if raw.startswith(f"{self.work}/"):
            target = os.path.realpath(raw) if os.path.islink(raw) else raw
            if target.startswith(f"{self.work}/"):
                return None
            raw = target  # a header that the build folder borrows from another package
        real = self._real_folder(os.path.dirname(raw))
        if f"{real}/".startswith(self.trusted):
            return None
        name = os.path.basename(raw)
        return os.path.join(real, name) if "/../" in raw or "/./" in raw else raw

    def _is_unchanged(self, raw: str, record: Record) -> bool:
        """Return whether a file that a tool also opened for writing is the one that was read."""
        signature = record.opened.get(raw)
        with suppress(OSError):
            return bool(signature) and recorded_signature(os.stat(raw)) == signature
        return False

    def _real_folder(self, folder: str) -> str:
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        return self._real[folder]

    def _digest(self, path: str, signature: str) -> str:
        """Return the digest of a file with the signature with which it was opened."""
        if path.startswith(GENERATED):
            return self.moment.digest(path)
        try:
            digest = self.moment.digest(path)
            now = os.stat(path)
            changed = max(now.st_ctime_ns, os.lstat(path).st_ctime_ns) >= self.started
        except FileNotFoundError:
            raise Changed(path) from None
        if changed or (signature and signature != recorded_signature(now)):
            raise Changed(path)
        return digest

    def _examined(self, record: Record) -> dict[str, str]:
        """Return the files that tools examined and did not open. They may decide the result, but a program only if it ran."""
        found = {}
        for raw in record.examined - record.opened.keys() - record.folders:
            if self._path(raw, record) is None or not os.path.isfile(raw):
                continue
            if not os.stat(raw).st_mode & 0o111:
                found[raw] = ""
        return found

    def _absences(self, missing: Iterable[str], record: Record) -> set[str]:
        found = set[str]()
        gone = set[str]()  # folders that do not exist, which hold most absences
        for raw in missing:
            folder = os.path.dirname(raw)
            if folder in gone or self._path(raw, record) is None:
                continue
            path = self._first_missing(raw)
            if path is None:
                raise Changed(raw)
            if f"{folder}/".startswith(f"{path}/"):
                gone.add(folder)
            if not path.startswith(f"{self.work}/") and not _of_kernel(path):
                found.add(path)
        return found

    def _first_missing(self, raw: str) -> str | None:
        """Return the first part of a path that does not exist; None if all do, as when a file appeared."""
        generated = f"{self.work}/generated/"
        if raw.startswith(generated):
            path = GENERATED + os.path.normpath(raw[len(generated) :])
            return None if self.moment.exists(path) else path
        folder, name = os.path.split(raw.rstrip("/.") if raw.endswith("/.") else raw.rstrip("/"))
        if os.path.isdir(folder):
            path = os.path.join(self._real_folder(folder) if "/../" in raw else folder, name)
            return None if os.access(path, os.F_OK) else path
        place = os.sep
        for part in folder.split(os.sep):
            place = os.path.join(place, part)
            if part == "..":
                place = os.path.realpath(place)
            if not os.path.isdir(place):
                return place
        return None

    def _local(self, record: Record) -> dict[str, str]:
        """Return the digests of the programs that ran, with their shared libraries, of the folders that were listed, and the real paths of
        folders that tools asked for."""
        found = {
            path: recorder.digest_of_program(path, signature)
            for path, signature in record.programs.items()
            if self._path(path, record) is not None
        }
        asked = [*record.opened, *record.examined, *record.missing]
        folders = record.examined - record.opened.keys()  # the others have digests
        folders |= {os.path.dirname(raw) for raw in asked}
        for folder in folders:
            if self._path(f"{folder}/.", record) is None or folder.startswith(f"{self.work}"):
                continue
            real = self.moment.digest(REAL + folder)
            if real and (real != folder or folder in record.examined):
                found[REAL + folder] = real
        for raw in record.listed:
            path = f"{raw.rstrip(os.sep)}/"
            if self._path(f"{path}.", record) is not None and not path.startswith(f"{self.work}/"):
                found[path] = self.moment.digest(path)
        return found


def _script(path: str, openers: Iterable[str]) -> str | None:
    """Return the text of a program that its interpreter ran, such as a compiler's wrapper in shell; None for any other file."""
    with suppress(OSError), open(path, "rb") as file:
        text = file.read() if file.read(2) == b"#!" else b""
        words = text.split(b"\n", 1)[0].split()
        interpreters = {os.path.realpath(word.decode()) for word in words if word.startswith(b"/")}
        searched = any(each.endswith("/env") for each in interpreters)  # in PATH
        if searched or interpreters & {*openers}:
            return text.decode("utf-8", "replace")
    return None


def _copies(digests: Mapping[str, str]) -> Iterator[str]:
    """Yield the files with the text of another one, which ``#pragma once`` and ``#import`` take for the same if their dates are equal."""
    count = Counter(digests.values())
    for path, digest in digests.items():
        if count[digest] > 1 and os.path.isfile(path):
            text = Path(path).read_bytes()
            if b"once" in text or b"import" in text:
                yield path


def _of_kernel(path: str) -> bool:
    """Return whether a path leads to no file of a user."""
    is_device = path.startswith("/dev/") and not path.startswith("/dev/shm/")
    return is_device or path.startswith(("/proc/", "/sys/"))

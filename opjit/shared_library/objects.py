"""Object files that builds of several sources keep, so that an edit of one compiles only that. They are verified as an op's parts are.

    <root>/v1/objects/<key>/    object.o, found.json, parts.json

The key has what decides an entry, apart from the link, and the command, the source and the headers that a scan finds from it, by path and
content. found.json has the SHA-256 of the headers that only the compiler found."""

import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from opjit import files
from opjit.builder import runtime_objects
from opjit.errors import UntrustedFolder
from opjit.recipe import headers
from opjit.shared_library.content import Content
from opjit.store.store import OBJECTS

_OBJECT, _FOUND = "object.o", "found.json"


@dataclass(frozen=True)
class KeptObjects:
    """The object files of one build, in its private folder `work`. `base` is the store's folder, and `more` what else decides them."""

    content: Content
    base: Path
    work: Path
    more: object
    trusted: tuple[str, ...]  # the prefixes of real paths that a version in the key covers
    started: int = field(default_factory=time.time_ns)
    read: set[str] = field(
        default_factory=set
    )  # the headers that only a compiler found, for kept objects
    keys: dict[Path, str] = field(
        default_factory=dict
    )  # of objects that are not kept, by their places

    def take(self, source: str, command: str, place: Path) -> bool:
        """Put a kept object in its place, if there is one."""
        self.keys[place], _ = self._key(source, command)
        with suppress(OSError):  # it is being removed
            folder = runtime_objects.find(self.base, self.keys[place], _fits, OBJECTS)
            if folder is not None:
                shutil.copyfile(folder / _OBJECT, place)
                self.read.update(json.loads((folder / _FOUND).read_bytes()))
                return True
        return False

    def keep(self, source: str, command: str, place: Path, read: Iterable[str]) -> None:
        """Keep an object that was not there, if nothing changed while it was compiled. `read` are the paths that the compiler read."""
        with suppress(OSError, UntrustedFolder):
            key, scanned = self._key(source, command)
            beyond = headers.unscanned(read, scanned, self.trusted)
            found = {
                path: files.digest(path)
                for path in beyond
                if os.stat(path).st_ctime_ns < self.started
            }
            if (
                key != self.keys[place]
                or len(found) < len(beyond)
                or os.fsencode(self.work) in place.read_bytes()
            ):
                return  # no other build has the folder `work`

            def make(staged: Path) -> None:
                shutil.copyfile(place, staged / _OBJECT)
                (staged / _FOUND).write_text(json.dumps(found))

            runtime_objects.put(self.base, key, _fits, make, OBJECTS)

    def _key(self, source: str, command: str) -> tuple[str, dict[str, str]]:
        """Return the key of an object, and the SHA-256 of the files that the scan finds."""
        words = [word for language in self.content.flags.values() for word in language]
        roots, include = (
            [source, *self.content.forced],
            (f"{self.work}/generated", *self.content.include),
        )
        scanned, document = headers.closure(roots, include, None, words), self.content.document()
        for part in ("name", "sources", "inline", "inputs"):
            del document[part]
        flags = {
            name: given
            for name, given in document["flags"].items()
            if name not in ("link", "ldflags")
        }
        text = json.dumps(
            [{**document, "flags": flags}, include, self.more, command, sorted(scanned.items())]
        )
        return text.replace(json.dumps(str(self.work))[1:-1], "<work>"), scanned


def _fits(folder: Path) -> bool:
    """Whether an object is unchanged, and the headers that its compiler found are."""
    with suppress(OSError):
        return runtime_objects.is_whole(folder, (_OBJECT, _FOUND)) and all(
            files.digest(path) == digest
            for path, digest in json.loads((folder / _FOUND).read_bytes()).items()
        )
    return False

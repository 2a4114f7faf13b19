"""Turn the reports of a build's tools into the files that it read and the paths that it searched
without success.

The preprocessor lists files by -MD and folders by -v, the assembler files by --MD, GNU ld files by
--dependency-file and attempts by --verbose. For a header that was found as FOLDER/NAME, each folder
before it in the search, and each folder of a file that may have included it by quotes, did not
contain NAME. Each of these paths is an absence, which is part of the key. A missing folder
represents all paths below it.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files
from opjit.recipe import compilers, interface, reads, unreported
from opjit.recipe.reads import GENERATED, INLINE, Moment, Places, Reads

_LISTS = re.compile(
    r'#include "\.\.\." search starts here:\n(.*?)#include <\.\.\.> search starts here:\n(.*?)End of search list',
    re.DOTALL,
)
_IGNORED = re.compile(r'ignoring (?:nonexistent|duplicate) directory "(.*)"')
_ATTEMPT = re.compile(r"^attempt to open (.+) failed$", re.MULTILINE)
_TEMPORARY = re.compile(r".*/cc\w+\.s|(?:.*/)?tmpxft_\w+[.-].*")  # the compilers' files
_OF_LINKER = re.compile(
    r"attempt to open .*|opened script file .*|using internal linker script:|\S*ld: mode \S+|GNU ld .*"
)
LISTED = ".d"
ASSEMBLED = compilers.ASSEMBLED
LINKED = "linked.d"


class Search(NamedTuple):
    """The folders that a compiler searches for headers, in order.

    For quoted names, the first are `quote`.
    """

    quote: tuple[str, ...]
    angle: tuple[str, ...]


def search(
    command: Sequence[str], language: str, notes: Path | None, honours: bool = False
) -> Search | None:
    """Return the folders that a compiler with flags prints as its search path, or None if it does
    not print them.

    `notes` keep its answer while the folders are the same ones.
    """
    program = command[0]
    variables = compilers.honoured() if honours else {}
    asked = [*command, language, os.getcwd(), reads.signature(os.path.realpath(program)), variables]
    note = notes / f"search-{reads.digest_of(asked)[:32]}" if notes is not None else None
    known = files.read_checked(note) if note is not None else None
    if isinstance(known, dict) and known["stamps"] == _stamps(known["stamps"]):
        return Search(tuple(known["quote"]), tuple(known["angle"]))
    verbose = ["-E", "-Xcompiler", "-v"] if language == "cu" else ["-E", "-v"]
    # With -MD, a compiler would write null.d into the current folder.
    words = [word for word in command if word not in ("-MD", "-MMD")]
    words += [*verbose, "-x", language, os.devnull]
    output = compilers.run_compiler(words, None, honours).stdout
    found = _LISTS.search(output)
    if found is None:
        return None
    quote, angle = ([line.strip() for line in part.splitlines()] for part in found.groups())
    if note is not None:
        stamps = _stamps([*quote, *angle, *_IGNORED.findall(output)])
        files.write_checked(note, {"quote": quote, "angle": angle, "stamps": stamps})
    return Search(tuple(quote), tuple(angle))


def _stamps(folders: Iterable[str]) -> dict[str, list[int] | None]:
    """Return the folders that exist, without duplicates in the compiler's sense."""
    found = dict[str, list[int] | None]()
    for folder in folders:
        try:
            status = os.stat(folder)
        except OSError:
            found[folder] = None
        else:
            found[folder] = [status.st_dev, status.st_ino]
    return found


def trusted_prefixes(folders: Iterable[str], system: Collection[str]) -> tuple[str, ...]:
    """Return the prefixes of real paths of files that are covered by a version in the key, but
    not of a folder with files of the system.
    """
    real = [os.path.realpath(folder) for folder in folders if folder]
    return tuple(
        folder + os.sep
        for folder in dict.fromkeys(real)
        if not any(f"{each}/".startswith(f"{folder}/") for each in system)
    )


def others(searched: Iterable[Search | None], system: Collection[str]) -> list[str]:
    """Return the absolute paths of the searched folders, except the compilers' default folders."""
    folders = [folder for each in searched if each for folder in (*each.quote, *each.angle)]
    paths = dict.fromkeys(reads.normalized(os.path.abspath(folder)) for folder in folders)
    return [path for path in paths if os.path.realpath(path) not in system]


def named_search(searched: Mapping[str, Search | None], places: Places) -> dict[str, Any] | None:
    """Return searched folders by portable names, for the key."""
    if not searched:
        return None

    def place(folder: str) -> str:
        path = reads.normalized(os.path.abspath(folder))
        real = os.path.realpath(path)
        return places.name(real if real in places.system else path)

    return {
        language: None if each is None else [[*map(place, each.quote)], [*map(place, each.angle)]]
        for language, each in searched.items()
    }


class Changed(Exception):
    """A file changed while tools may have read it. The message is its path."""


@dataclass(frozen=True)
class ReportReader:
    """Record the reports of the tools of one build, before the folder `work` is gone.

    `trusted`: prefixes of real paths of files with a version in the key; `started`: a time of
    `files.tick` before the tools ran.
    """

    work: str
    folder: str  # in which the tools ran
    moment: Moment
    system: tuple[str, ...]
    trusted: tuple[str, ...]
    started: int
    _real: dict[str, str] = field(default_factory=dict)
    _parents: dict[str, bool] = field(default_factory=dict)

    def compiled(
        self,
        read: Sequence[str],
        assembled: Sequence[str],
        searched: Search | None,
        output: str = "",
        words: Sequence[str] = (),
    ) -> Reads:
        """Return the files that a compilation read, from the lists of its preprocessor and
        assembler; `output` has the compiler's warnings.
        """
        generated = [f"{self.work}/generated"] if self.moment.texts else []
        order = (*searched.quote, *generated, *searched.angle) if searched else ()
        headers = self._digests(read)
        others = self._digests(_without_names(assembled, read, self.folder))
        absent = {*self._before(read, order, beside=True), *self._before(assembled, order)}
        doubt = unreported.used_date(output)
        if not read:
            doubt = "the compiler does not list the files that it reads"
        if searched is None:
            doubt = doubt or "the compiler does not print the directories that it searches"
        present, missing, reason = self._asked(headers, order, words)
        doubt = doubt or reason or self._doubt(headers, words, bool(assembled))
        doubt = doubt or self._skipped(headers, order) or ""
        return Reads({**headers, **others, **present}, frozenset(absent | missing), doubt)

    def linked(self, listing: Path, output: str) -> Reads:
        """Return the files that GNU ld read, from its list and its output, for example the
        members of a thin archive.
        """
        if not listing.is_file():
            return Reads({}, frozenset(), "the linker does not list the files that it reads")
        lines = [line for line in _body(output).splitlines() if line.strip()]
        opened = [line for line in lines if os.path.isfile(os.path.join(self.folder, line))]
        text = listing.read_text("utf-8", "surrogateescape").partition("\n\n")[0]
        named = [line.removesuffix("\\").strip() for line in text.splitlines()[1:]]
        digests = self._digests([*named, *opened], linked=True)
        paths = (self._path(each) for each in _ATTEMPT.findall(output))
        absent = {self._missing(path) for path in paths if path is not None}
        return Reads(digests, frozenset(absent), "")

    def _path(self, raw: str) -> str | None:
        """Return the path by which a file is recorded.

        None for a file of this build, and for a file that is covered by a version in the key.
        """
        path = os.path.join(self.folder, raw)
        generated = f"{self.work}/generated/"
        if path.startswith((GENERATED, INLINE)):
            return path
        if path.startswith(generated):
            return GENERATED + os.path.normpath(path[len(generated) :])
        if path == os.devnull:
            return None
        if path.startswith(self.work + os.sep):
            target = os.path.realpath(path)
            if not os.path.islink(path) or target.startswith(self.work + os.sep):
                return None
            path = target  # a header that the build folder borrows from another package
        folder = os.path.dirname(path)
        real = self._real.get(folder)
        if real is None:
            real = self._real[folder] = os.path.realpath(folder) + os.sep
        return None if real.startswith(self.trusted) else reads.normalized(path)

    def _digests(self, read: Iterable[str], linked: bool = False) -> dict[str, str]:
        found = {}
        for raw in read:
            path = self._path(raw)
            if path is None or path in found:
                continue
            if path.startswith(GENERATED):
                found[path] = self.moment.digest(path)
                continue
            try:
                changed = max(os.stat(path).st_ctime_ns, os.lstat(path).st_ctime_ns)
                if changed >= self.started:
                    raise Changed(path)
                found[path] = self.moment.digest(path, linked and interface.is_shared(path))
            except FileNotFoundError:
                if not _TEMPORARY.fullmatch(raw):
                    raise Changed(path) from None
        return found

    def _is_system(self, path: str) -> bool:
        return path.startswith(tuple(f"{folder}/" for folder in self.system))

    def _before(self, read: Sequence[str], order: Sequence[str], beside: bool = False) -> set[str]:
        """Return the paths without a file that were searched before each file was found."""
        ours = [raw for raw in read if not self._is_system(raw)]
        includers = list(dict.fromkeys(os.path.dirname(raw) for raw in ours)) if beside else [""]
        names = defaultdict[tuple[int, str], set[str]](set)  # by folder, and the first part
        for raw in read:
            for index, folder in enumerate(order):
                if raw.startswith(f"{folder}/"):
                    name = raw[len(folder) + 1 :]
                    names[index, name.partition("/")[0]].add(name)
        found = set[str]()
        for (index, first), below in names.items():
            for earlier in (*includers, *order[:index]):
                is_there = os.path.lexists(os.path.join(self.folder, earlier, first))
                for name in below if is_there else [first]:
                    path = self._path(self._gap(os.path.join(earlier, name)))
                    if path is not None and path not in found:
                        self._add_absence(path, found)
        return found

    def _gap(self, path: str) -> str:
        """Return the first part of a path with ``..`` that leads nowhere, or the path: `a/../x.h` is no file if there is no folder a."""
        if ".." not in path:
            return path
        parts = os.path.join(self.folder, path).split(os.sep)
        places = (os.sep.join(parts[:end]) for end in range(2, len(parts)))
        return next((place for place in places if not os.path.isdir(place)), path)

    def _add_absence(self, path: str, to: set[str]) -> None:
        if not self.moment.exists(path):
            to.add(self._missing(path))
        elif os.path.isdir(path):
            to.add(path + os.sep)

    def _missing(self, path: str) -> str:
        """Return the first missing folder on the way to a path that is missing, or the path."""
        while not self._is_folder(parent := os.path.dirname(path)):
            path = parent
        return path

    def _is_folder(self, path: str) -> bool:
        if path not in self._parents:
            is_there = self.moment.exists(path) or path + os.sep in (GENERATED, os.sep)
            self._parents[path] = is_there
        return self._parents[path]

    def _asked(
        self, headers: Mapping[str, str], order: Sequence[str], words: Sequence[str]
    ) -> tuple[dict[str, str], set[str], str | None]:
        """Return the digests of headers that texts request, the absences of missing headers, and
        the reason why the list may be incomplete.
        """
        if any("has_include" in word for word in words):
            return {}, set(), "a flag has __has_include"
        asked, doubt = unreported.asked_headers({path: self.moment.text(path) for path in headers})
        present = dict[str, str]()
        absent = set[str]()
        for each in asked:
            for folder in (each.folder, *order) if each.quoted else order:
                place = os.path.join(self.folder, folder, each.name)
                path = self._path(self._gap(place))
                if os.path.isfile(place) or (path is not None and path in self.moment.texts):
                    present |= self._digests([place] if path != each.name else [])
                    break
                if path is not None:
                    self._add_absence(path, absent)
        return present, absent, doubt

    def _skipped(self, headers: Mapping[str, str], order: Sequence[str]) -> str | None:
        """Return a reason if the preprocessor may skip a header because it equals another one with
        ``#pragma once``. It does not list that header, and the headers' dates matter.
        """
        ours = [path for path in headers if not self._is_system(path)]
        texts = {path: self.moment.text(path) for path in ours}
        if not any(map(unreported.ONCE.search, texts.values())):
            return None
        included, computed = unreported.included_headers(texts)
        if computed is not None:
            return f"{computed} includes a header by a macro, and #pragma once may skip it"
        known = {digest: path for path, digest in headers.items()}
        for each in included:
            folders = (each.folder, *order) if each.quoted else order
            places = (os.path.join(self.folder, folder, each.name) for folder in folders)
            path = self._path(next(filter(os.path.isfile, places), os.devnull))
            if path is None:
                continue
            other = known.get(self.moment.digest(path), path)
            if other != path and unreported.ONCE.search(self.moment.text(path)):
                return f"{path} equals {other}, and #pragma once may skip it"
        return None

    def _doubt(
        self, headers: Iterable[str], words: Sequence[str], asks_assembler: bool
    ) -> str | None:
        """Return a reason if a text may use a macro for date and time and the compilers do not warn
        about it, or if it may let the assembler read a file, unless `asks_assembler`: that lists its files.
        """
        for path in headers:
            text = self.moment.text(path)
            of_system = self._is_system(path)
            if (of_system or "-w" in words) and unreported.DATES.search(text):
                return f"{path} has __DATE__, __TIME__ or __TIMESTAMP__"
            if not (of_system or asks_assembler) and unreported.ASSEMBLY.search(text):
                return f"{path} may have the assembler read a file, which it does not list"
        return None


def preprocessed_files(command: Sequence[str], work: Path) -> list[str]:
    """Return the files that a compiler's preprocessor reports to read.

    Empty if it ends early. `command` has the source.
    """
    listing = work / "preprocessed.d"
    compilers.run_compiler([*command, "-M", "-MG", "-MF", str(listing)], work)
    listed = reads.listed([listing]) if listing.is_file() else []
    paths = [reads.normalized(os.path.join(work, path)) for path in listed]
    return [path for path in dict.fromkeys(paths) if os.path.isfile(path)]


def _without_names(assembled: Iterable[str], read: Sequence[str], folder: str) -> list[str]:
    """Return the files that an assembler read, without files that only debug information names,
    because prefix maps change their paths.
    """
    return [
        name
        for name in assembled
        if os.path.exists(os.path.join(folder, name))
        or not any(f"/{path}".endswith(f"/{name}") for path in read)
    ]


def _body(output: str) -> str:
    """Return a linker's output without its default script and its list of emulations."""
    script = r"={10,}\n.*?\n={10,}\n"
    return re.sub(
        rf"{script}|  Supported emulations:\n(?: {{3}}\S+\n)*", "", output, flags=re.DOTALL
    )


def without_attempts(output: str) -> str:
    """Return a linker's output without the output of --verbose."""
    lines = _body(output).splitlines(keepends=True)
    tried = set(re.findall(r"^attempt to open (.+) succeeded$", output, re.MULTILINE))
    return "".join(
        line
        for line in lines
        if not _OF_LINKER.fullmatch(line.strip()) and line.strip() not in tried
    )

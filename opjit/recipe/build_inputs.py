"""The inputs of a build that are known before it, and the folder of its entries in the cache.

    <root>/v2/<subject>/<target>-<base>/<key>/

<base> is the start of the base key, which a machine without compilers can also compute. The key
covers also the compilers, the folders that they search, the files that they report to have read,
and the places where they found none; see FORMAT.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from opjit import files
from opjit.backends.targets import Target
from opjit.errors import BuildError, EntryError
from opjit.processes import CachedProperty
from opjit.recipe import reads
from opjit.recipe.document import FORMAT, base_key, document_key
from opjit.recipe.reads import INLINE, Moment, Places, Reads

LIBRARY = "opjit.build"
EXTENSION = "torch.utils.cpp_extension"  # the maker of the document
_FOLDERS = {LIBRARY: "shared_library", EXTENSION: "cpp_extension"}
# No build file can contain these characters. A surrogate is a byte that is not UTF-8.
UNNAMEABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
B = TypeVar("B", bound="BuildInputs")


@dataclass(frozen=True)
class BuildInputs:
    """Everything that decides the bytes of a binary, before a build: of an op, an extension or a shared library."""

    name: str
    sources: tuple[str, ...]  # paths
    texts: Mapping[str, bytes]  # sources and headers that are no files, by path
    places: Places
    known: Mapping[str, str]  # SHA-256 of sources and texts by portable name
    toolchain: Mapping[str, str] | None  # the tools' versions; None if one is missing
    doubt: str  # why its entries are not cached; empty if they are
    # Whether only a list names it, so that no other user may be able to write a file that it reads.
    only_listed: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return f"{self.name} for {self.purpose}"

    @property
    def purpose(self) -> str:
        """The target, for messages."""
        raise NotImplementedError

    def fault(self, what: str, command: str | None = None) -> BuildError:
        """Make an error of its build."""
        text = f"{self} was not built: {what}"
        return BuildError(text, op=self.name, target=self.purpose, command=command)

    @property
    def op_target(self) -> Target | None:
        """The target of an op; None for another binary."""
        return None

    @property
    def ways(self: B) -> Sequence[B]:
        """The inputs with equally good binaries, the preferred first."""
        return (self,)

    @property
    def file_name(self) -> str:
        """The binary's name in an entry."""
        return re.sub(r"\W", "_", self.name, flags=re.ASCII)[:200] + ".so"

    @property
    def place_of_entries(self) -> str:
        """The folder below the store's of the entries that differ only in their tools, and in what those read."""
        return self.place_of(self.request)

    def place_of(self, document: Mapping[str, Any]) -> str:
        """The same for an entry with a document."""
        return entries_folder(document)

    def own_fields(self) -> dict[str, Any]:
        """Return the fields of the document that only this kind of binary has."""
        raise NotImplementedError

    @CachedProperty
    def request(self) -> Mapping[str, Any]:
        """The document of all that is known before a build."""
        tools = self.toolchain
        return {
            "format": FORMAT,
            **self.own_fields(),
            "known": dict(sorted(self.known.items())),
            "toolchain": None if tools is None else dict(sorted(tools.items())),
            "inputs": {},
            "absent": {},
        }

    def document(self, read: Reads = reads.NOTHING) -> dict[str, Any]:
        """Return the document that the key of an entry hashes, with what its build read."""
        found = read.document(self.places)
        for name in self.known.keys() & found["inputs"].keys():
            del found["inputs"][name]
        return {**self.request, **found}

    @CachedProperty
    def key(self) -> str:
        """The hash of all that is known before a build."""
        return document_key(self.request)

    @CachedProperty
    def base(self) -> str:
        """The same without the tools."""
        return base_key(self.request)

    def now(self: B) -> B:
        """Return it with the sources as they are now. Raises FileNotFoundError if one is gone."""
        moment = Moment(self.texts)
        known = {}
        doubt = ""
        for path in (*self.sources, *(path for path in self.texts if not path.startswith(INLINE))):
            name = self.places.name(path)
            try:
                known[name] = moment.digest(path)
            except FileNotFoundError:
                raise
            except OSError as error:
                known[name] = files.random_name()
                doubt = f"{name} cannot be read ({error.strerror})"
        return replace(self, known=known, doubt=self.doubt or doubt)

    def matches_tools(self, made_by: Any) -> bool:
        """Return whether the binary of other tools is as good, by the versions of these."""
        return self.toolchain is None

    def fits(self, document: Mapping[str, Any], note: Path | None = None) -> bool:
        """Return whether an entry with a document is wanted: all that is known is equal, and so are the files that its build read.
        Without a compiler here, the binary of any compiler is. `note` keeps signatures of the files."""
        given = ["inputs", "absent"]
        made_by = document.get("toolchain")
        if made_by != self.request["toolchain"] and self.matches_tools(made_by):
            given += ["toolchain"]
        wanted = {**self.request, **{name: document.get(name) for name in given}}
        kept = None if self.toolchain is None else note  # it also has the compilers' files
        return document == wanted and next(self.changes(document, kept), None) is None

    def changes(self, document: Mapping[str, Any], note: Path | None = None) -> Iterator[str]:
        """Yield the differences between the files now and the files that the build of an entry
        read.
        """
        return reads.changes(document, self.places, Moment(self.texts), note)


@dataclass(frozen=True)
class ProjectInputs(BuildInputs):
    """The inputs of an extension or a library, which is made from any sources."""

    made_by: ClassVar[str]
    flags: Mapping[str, Sequence[str]]  # the words of the command line by language

    def own_fields(self) -> dict[str, Any]:
        return {
            "made_by": self.made_by,
            "name": self.name,
            "sources": [self.places.name(path) for path in self.sources],
            "inline": {},
            "flags": {language: list(words) for language, words in self.flags.items()},
        }


def folder_name(made_by: str, name: str) -> str:
    """The folder of all entries of an extension or a library in the store's; similar names may share it."""
    return f"{_FOLDERS[made_by]}.{re.sub('[^A-Za-z0-9]', '_', name[:100])}"


def entries_folder(document: Mapping[str, Any]) -> str:
    """The folder of an extension's or a library's entries in the store's.

    Raises EntryError if the document describes neither.
    """
    match document:
        case {"made_by": "opjit.build", "name": str(name), "host": "x86_64" | "aarch64" as target}:
            made_by = LIBRARY
        case {
            "made_by": "torch.utils.cpp_extension",
            "name": str(name),
            "torch": [str(version), *_],
            "python": [str(suffix), *_],
        }:
            made_by = EXTENSION
            target = f"{'-'.join(suffix.strip('.').split('-')[:2])}-torch{version}"
        case {
            "made_by": "torch.utils.cpp_extension",
            "name": str(name),
            "stable": [str(version), str(host), *_],
        }:
            made_by = EXTENSION
            target = f"{host}-torch{version}"
        case _:
            raise EntryError("its manifest names neither a C++ extension nor a shared library")
    if not re.fullmatch(r"[\w.+-]+", target, flags=re.ASCII):
        raise EntryError(f"its manifest names a version {target!r}")
    return f"{folder_name(made_by, name)}/{target}-{base_key(document)[:20]}"

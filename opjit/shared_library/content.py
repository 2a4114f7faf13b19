"""What decides the bytes of a binary from any sources, and where the cache keeps it: the core of shared libraries and C++ extensions.

    <root>/v1/shared_library.<name>/<host>-<base>/<key>/                    <host>: x86_64 or aarch64
    <root>/v1/cpp_extension.<name>/<python>-torch<version>-<base>/<key>/    <python>: such as cpython-312, or <host> for any

<base> covers all that is known before a build: sources, the headers that a scan of #include lines finds, flags and archs; for an extension
torch and Python, too, or the version of torch's stable ABI. The key adds the compilers, and the headers that only a compiler finds (through
an #include of a macro, say). The manifest lists those headers, and each look-up compares their content. Headers of the compilers and of the
CUDA Toolkit count by version."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from opjit import files, resources
from opjit.errors import EntryError
from opjit.recipe import headers
from opjit.recipe.document import FORMAT, base_key, document_key
from opjit.recipe.toolchain import Compiler, Nvcc, Nvrtc

LIBRARY, EXTENSION = "opjit.build", "torch.utils.cpp_extension"  # who made the document
GENERATED = "/<generated>/"  # the folder of texts that are no files, as far as a scan is concerned
INLINE = "/<inline>/"  # the same, of texts that the document has elsewhere
USERS_FOLDER = "/usr/local/include"  # compilers search it, but their versions say nothing about the headers that users put there
_FOLDERS = {LIBRARY: "shared_library", EXTENSION: "cpp_extension"}
_TARGET = re.compile(r"[\w.+-]+", re.ASCII)
C = TypeVar("C", bound="Content")


@dataclass(frozen=True)
class Content:
    """Everything that decides the bytes of a binary."""

    made_by: ClassVar[str]
    name: str
    sources: tuple[str, ...]  # paths
    forced: tuple[str, ...]  # paths of files that flags include
    texts: Mapping[
        str, bytes
    ]  # sources and headers that are no files, by path below GENERATED or INLINE
    flags: Mapping[
        str, Sequence[str]
    ]  # the words of the command line by language, without the paths of folders and files
    archives: tuple[str, ...]  # paths of static libraries, which become part of the binary
    include: tuple[
        str, ...
    ]  # the folders of headers, except those that a version in the key covers
    inputs: Mapping[
        str, str
    ]  # the SHA-256 of every source and header that the scan finds, by portable name
    toolchain: Mapping[str, str] | None  # the compilers' versions; None if a compiler is missing

    @property
    def purpose(self) -> str:
        """The target, for messages."""
        raise NotImplementedError

    @property
    def folder(self) -> str:
        """The folder from which portable names start."""
        return os.path.dirname(self.sources[0]) if self.sources else os.sep

    @property
    def file_name(self) -> str:
        """The binary's name in an entry."""
        return re.sub(r"\W", "_", self.name, flags=re.ASCII)[:200] + ".so"

    def document(self) -> dict[str, Any]:
        """The document that the key hashes; a build adds the headers that the compiler found."""
        return {
            "format": FORMAT,
            "made_by": self.made_by,
            "name": self.name,
            "sources": [self.portable(path) for path in self.sources],
            "inline": {},
            "flags": {language: list(words) for language, words in self.flags.items()},
            "inputs": dict(sorted(self.inputs.items())),
            "toolchain": None if self.toolchain is None else dict(sorted(self.toolchain.items())),
            "found": {},
        }

    @property
    def key(self) -> str:
        """The hash of the document, without the headers that a compiler found."""
        return document_key(self.document())

    @property
    def base(self) -> str:
        """The same without the compilers."""
        return base_key(self.document())

    @property
    def place_of_entries(self) -> str:
        """The folder below v1 of the entries that differ only in their compilers, and in the headers that those found."""
        return entries_folder(self.document())

    def portable(self, path: str) -> str:
        """Return a file's name in the key, the same on every machine."""
        if path.startswith((GENERATED, INLINE)):
            return path[1:]
        return headers.portable_name(
            path, self.folder, str(resources.folder("kernels_c")), self.include
        )

    def place(self, name: str) -> str:
        """Return the path of a portable name. Raises EntryError if it is in no include folder that is known here."""
        if name.startswith("<opjit>/"):
            return str(resources.folder("kernels_c") / name.removeprefix("<opjit>/"))
        try:
            return os.path.normpath(headers.path_of(name, self.folder, self.include))
        except IndexError:
            raise EntryError(f"its manifest names {name}, which is in no include folder") from None

    def scanned(self: C) -> C:
        """Return it with the inputs as they are now."""
        scan = headers.Scan()
        scan.texts.update(self.texts)
        words = [word for language in self.flags.values() for word in language]
        found = headers.closure(
            [*self.sources, *self.forced, *self.texts], self.include, scan, words
        )
        found |= {path: files.digest(path) for path in self.archives}
        return replace(
            self,
            inputs={
                self.portable(path): digest
                for path, digest in found.items()
                if not path.startswith(INLINE)
            },
        )


def folder_name(made_by: str, name: str) -> str:
    """The folder below v1 of all entries of an extension or a library; similar names may share it."""
    return f"{_FOLDERS[made_by]}.{re.sub('[^A-Za-z0-9]', '_', name[:100])}"


def entries_folder(document: Mapping[str, Any]) -> str:
    """The folder of an extension's or a library's entries below v1, by the document of any. Raises EntryError if it is that of neither."""
    match document:
        case {"made_by": "opjit.build", "name": str(name), "host": "x86_64" | "aarch64" as target}:
            made_by = LIBRARY
        case {
            "made_by": "torch.utils.cpp_extension",
            "name": str(name),
            "torch": [str(version), *_],
            "python": [str(suffix), *_],
        }:
            made_by, target = (
                EXTENSION,
                f"{'-'.join(suffix.strip('.').split('-')[:2])}-torch{version}",
            )
        case {
            "made_by": "torch.utils.cpp_extension",
            "name": str(name),
            "stable": [str(version), str(host), *_],
        }:
            made_by, target = EXTENSION, f"{host}-torch{version}"
        case _:
            raise EntryError("its manifest names no C++ extension and no shared library")
    if not _TARGET.fullmatch(target):
        raise EntryError(f"its manifest names a version {target!r}")
    return f"{folder_name(made_by, name)}/{target}-{base_key({**document, 'found': {}})[:20]}"


def trusted_prefixes(
    tools: Iterable[Compiler | Nvcc | Nvrtc | None], more: Iterable[str]
) -> tuple[str, ...]:
    """The prefixes of real paths that a version in the key covers: the compilers' headers, and more folders."""
    folders = [*more]
    for tool in tools:
        if isinstance(tool, Compiler):
            folders += (
                folder
                for folder in tool.includes.split(":")
                if folder != os.path.realpath(USERS_FOLDER)
            )
        elif isinstance(tool, Nvcc):
            folders.append(tool.root)
        elif isinstance(tool, Nvrtc):
            folders += tool.headers.split(":")
    return files.inside(folders)

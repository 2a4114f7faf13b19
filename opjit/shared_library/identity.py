"""What decides the bytes of a shared library, and where the cache keeps it:

    <root>/v1/shared_library.<name>/<host>-<base>/<key>/    <host>: x86_64 or aarch64

<base> covers sources, the headers that a scan of #include lines finds, flags and archs; the key adds the compilers, and the headers that
only they find. Neither has torch, Python, a path or a date. Headers of the compilers and of the CUDA Toolkit count by version.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opjit import files, resources
from opjit.errors import BuildError, EntryError, ToolMissing, UnknownArch
from opjit.recipe import headers, nvcc_flags, toolchain
from opjit.recipe.command_line import CommandLine
from opjit.recipe.recipe import FORMAT, base_key, document_key
from opjit.recipe.toolchain import Compiler, Nvcc

MADE_BY = "opjit.build"
LANGUAGES = {".c": "c", ".cc": "c++", ".cpp": "c++", ".cxx": "c++", ".cu": "cuda"}
_GENERATED = "/<generated>"  # the folder of generated sources, as far as a scan is concerned
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_FILE = re.compile(r"(\w[\w.+-]*/)*\w[\w.+-]*", re.ASCII)
_ARCH = re.compile(r"(?:(sm_|compute_)?(\d{2,3})|(\d{1,2})\.(\d))([af]?)(\+PTX)?")
# Flags that make tools run or read what the key does not cover.
_UNSEEN = re.compile(r"@|-B|-specs|--sysroot|-isysroot|-wrapper|-f(?:plugin|auto-profile|profile-use|module)|-Wp,|-save-temps|-o$|-M|-c$|"
                     rf"-X(?!compiler|ptxas)|(?:{nvcc_flags.UNSEEN})")


@dataclass(frozen=True)
class Library:
    """Everything that decides the bytes of a shared library, and how to compile it here.

    Attributes:
        name: for messages, and the file's.
        sources: paths, in the order of the link.
        generated: the contents of generated files by name; those with a source's suffix are compiled after `sources`.
        given: the compilers' and the linker's flags by language, as they were given; the C++ compiler's have ``"c"``.
        flags: the same without paths.
        archives: static libraries, which become part of the binary.
        include: folders of headers.
        archs: such as ``("sm_90a", "compute_90")``; empty without CUDA code, or if flags name them.
        inputs: the SHA-256 of every source and header that the scan finds, by portable name.
        toolchain: the compilers' versions; None if one is missing.
        launcher: a program before each compiler, such as sccache. It is not part of the key.
    """

    name: str
    sources: tuple[str, ...]
    generated: Mapping[str, bytes]
    given: Mapping[str, Sequence[str]]
    flags: Mapping[str, Sequence[str]]
    archives: tuple[str, ...]
    include: tuple[str, ...]
    archs: tuple[str, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    toolchain: Mapping[str, str] | None = None
    launcher: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The folder from which portable names start."""
        return os.path.dirname(self.sources[0]) if self.sources else _GENERATED

    @property
    def purpose(self) -> str:
        """The target, for messages."""
        return " ".join([platform.machine(), *self.archs])

    @property
    def languages(self) -> set[str]:
        return languages([*self.sources, *self.generated])

    def document(self) -> dict[str, Any]:
        """The document that the key hashes; a build adds the headers that the compiler found."""
        return {"format": FORMAT, "made_by": MADE_BY, "name": self.name, "host": platform.machine(),
                "sources": [*map(self.portable, self.sources), *(f"<generated>/{name}" for name in sorted(self.generated))],
                "inline": {}, "flags": {language: list(words) for language, words in self.flags.items()},
                "archs": list(self.archs) if "cuda" in self.languages else None, "inputs": dict(sorted(self.inputs.items())),
                "toolchain": None if self.toolchain is None else dict(sorted(self.toolchain.items())), "found": {}}

    @property
    def key(self) -> str:
        return document_key(self.document())

    @property
    def base(self) -> str:
        return base_key(self.document())

    @property
    def place_of_entries(self) -> str:
        return entries_folder(self.document())

    def portable(self, path: str) -> str:
        if path.startswith(f"{_GENERATED}{os.sep}"):
            return path[1:]
        return headers.portable_name(path, self.folder, str(resources.folder("kernels_c")), self.include)

    def place(self, name: str) -> str:
        try:
            return os.path.normpath(headers.path_of(name, self.folder, self.include))
        except IndexError:
            raise EntryError(f"its manifest names {name}, which is in no include folder") from None

    def scanned(self) -> Library:
        """Return it with the inputs as they are now."""
        scan = headers.Scan()
        texts = {f"{_GENERATED}/{name}": content for name, content in self.generated.items()}
        scan.texts.update(texts)
        found = headers.closure([*self.sources, *texts], self.include, scan) | {path: files.digest(path) for path in self.archives}
        return replace(self, inputs={self.portable(path): digest for path, digest in found.items()})


def languages(paths: Iterable[str]) -> set[str]:
    """Return the languages of the sources among files."""
    return {LANGUAGES[suffix] for path in paths if (suffix := os.path.splitext(path)[1]) in LANGUAGES}


def folder_name(name: str) -> str:
    """The name of the folder of all entries of a library; similar names may share it."""
    return "shared_library." + re.sub(r"\W", "_", name, flags=re.ASCII)


def entries_folder(document: Mapping[str, Any]) -> str:
    """The folder of a library's entries below v1, by the document of any of them. Raises EntryError if it is not a library's."""
    name, host = document.get("name"), document.get("host")
    if document.get("made_by") != MADE_BY or not (isinstance(name, str) and _NAME.fullmatch(name)) or host not in ("x86_64", "aarch64"):
        raise EntryError("its manifest names no shared library")
    return f"{folder_name(name)}/{host}-{base_key({**document, 'found': {}})[:20]}"


def describe(name: str, sources: Sequence[str | os.PathLike[str]], generated: Mapping[str, str], given: Mapping[str, Sequence[str]],
             include: Sequence[str | os.PathLike[str]], archs: Sequence[str] | None, launcher: Sequence[str],
             notes: Path | None) -> Library:
    """Describe the library that a call of `opjit.build` requests; see there for the arguments and errors."""
    def wrong(text: str) -> BuildError:
        return BuildError(f"opjit.build of {name!r}: {text}", op=str(name), target="a shared library")

    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong("expected a name of at most 100 letters, digits and '_.-', with a letter, a digit or '_' first")
    for parameter, value in {"sources": sources, "include": include, "launcher": launcher, "archs": archs or (), **given}.items():
        if isinstance(value, (str, bytes)):
            raise wrong(f"{parameter} is one string, {value!r}; expected a list of them")
    paths = tuple(os.path.abspath(os.fspath(path)) for path in sources)
    used = languages([*paths, *generated])
    strange = next((path for path in paths if os.path.splitext(path)[1] not in LANGUAGES), None)
    if strange is not None:
        raise wrong(f"{strange} has the suffix of no source; expected one of {' '.join(LANGUAGES)}")
    if not used:
        raise wrong(f"it has no sources: name one or more files, or generated texts, with the suffixes {' '.join(LANGUAGES)}")
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None:
        raise wrong(f"there is no source {missing}")
    odd = next((each for each in generated if not _FILE.fullmatch(each)), None)
    if odd is not None:
        raise wrong(f"{odd!r} cannot be the name of a generated file; expected a relative path of letters, digits and '_.+-'")
    unseen = next((flag for words in given.values() for flag in words
                   if any(map(_UNSEEN.match, [flag, *(re.split("[=,]", flag) if flag.startswith("-Xcompiler") else ())]))), None)
    if unseen is not None:
        raise wrong(f"the flag {unseen} makes a tool run, read or write what the key does not cover; leave it out")
    found_archs = _archs(name, archs, given["cuda_cflags"]) if "cuda" in used else ()
    line = CommandLine(os.getcwd())
    flags = {kind: line.add([shlex.quote(word) for word in words]) for kind, words in given.items()}
    named = [*(os.path.abspath(os.fspath(folder)) for folder in include), *line.include, *map(os.path.dirname, line.forced)]
    texts = {each: text.encode("utf-8", "surrogateescape") for each, text in sorted(generated.items())}
    return Library(name, paths, texts, given, flags, tuple(line.archives()), tuple(dict.fromkeys(named)), found_archs, {},
                   compilers(used, notes), tuple(launcher)).scanned()


def _archs(name: str, given: Sequence[str] | None, flags: Iterable[str]) -> tuple[str, ...]:
    """Return the archs to compile CUDA code for; empty if the flags name them."""
    if given is None and any(re.match("-gencode|--generate-code|-arch|--gpu-architecture", flag) for flag in flags):
        return ()
    if given is None:
        given = re.split(r"[;+ ](?!PTX)", os.environ.get("OPJIT_ARCH") or os.environ.get("TORCH_CUDA_ARCH_LIST") or "")
    found = list[str]()
    for each in filter(None, given):
        parts = _ARCH.fullmatch(each)
        if parts is None:
            raise UnknownArch(f"opjit.build of {name!r}: unknown CUDA arch {each!r}; expected one like sm_90a, 9.0a, 120f, 9.0+PTX or "
                              "compute_90")
        number = (parts[2] or f"{parts[3]}{parts[4]}") + parts[5]
        found += [f"{parts[1] or 'sm_'}{number}", *([f"compute_{number}"] if parts[6] else [])]
    if not found:
        raise UnknownArch(f"opjit.build of {name!r}: it has CUDA code and no arch; give archs=['9.0a'], say, or set OPJIT_ARCH=sm_90a")
    return tuple(dict.fromkeys(found))


def compilers(used: set[str], notes: Path | None) -> dict[str, str] | None:
    """Return the versions of the compilers of some languages, for the key; None if one is missing."""
    try:
        found = tools(used, notes, toolchain.find_compiler, toolchain.find_cxx, toolchain.find_nvcc)
    except ToolMissing:
        return None
    return None if None in found.values() else versions(found)


def tools(used: set[str], notes: Path | None, c: Callable[[Path | None], Compiler | None], cxx: Callable[[Path | None], Compiler | None],
          nvcc: Callable[[Path | None], Nvcc | None]) -> dict[str, Compiler | Nvcc | None]:
    """Return the compilers of some languages, as functions find them; nvcc needs one of C++."""
    needed = used | ({"c++"} if "cuda" in used else set())
    return {language: find(notes) for language, find in (("c", c), ("c++", cxx), ("cuda", nvcc)) if language in needed}


def versions(found: Mapping[str, Compiler | Nvcc | None]) -> dict[str, str]:
    """Return the versions of compilers, by which a key names them."""
    return {language: tool.build if isinstance(tool, Nvcc) else f"{tool.version} for {tool.machine}"
            for language, tool in found.items() if tool is not None}

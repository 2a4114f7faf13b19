"""The shared library that a call of `opjit.build` requests. Its key has no torch, no Python, no path and no date."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opjit.errors import BuildError, ToolMissing, UnknownArch
from opjit.recipe import nvcc_flags, toolchain
from opjit.recipe.command_line import CommandLine
from opjit.recipe.toolchain import Compiler, Nvcc
from opjit.shared_library.content import GENERATED, LIBRARY, Content

LANGUAGES = {".c": "c", ".cc": "c++", ".cpp": "c++", ".cxx": "c++", ".cu": "cuda"}
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_FILE = re.compile(r"(\w[\w.+-]*/)*\w[\w.+-]*", re.ASCII)
NAMES_ARCH = re.compile("-gencode|--generate-code|-arch|--gpu-architecture")
_ARCH = re.compile(r"(?:(sm_|compute_)?(\d{2,3})|(\d{1,2})\.(\d))([af]?)(\+PTX)?")
# Flags that make tools run or read what the key does not cover.
_UNSEEN = re.compile(
    r"@|-B|-specs|--sysroot|-isysroot|-wrapper|-f(?:plugin|auto-profile|profile-use|module)|-Wp,|-save-temps|-o$|-M|-c$|"
    rf"-X(?!compiler|ptxas|fatbin=-compress)|(?:{nvcc_flags.UNSEEN})"
)


@dataclass(frozen=True)
class Library(Content):
    """What decides a shared library's bytes, and how to compile it here; its texts with a source's suffix are compiled after `sources`."""

    made_by = LIBRARY
    given: Mapping[str, Sequence[str]]  # the flags, by the parameters of `opjit.build`
    archs: tuple[
        str, ...
    ]  # such as ``("sm_90a", "compute_90")``; empty without CUDA code, or if flags name them
    launcher: tuple[
        str, ...
    ]  # a program before each compiler, such as sccache; not part of the key

    @property
    def purpose(self) -> str:
        return " ".join([os.uname().machine, *self.archs])

    @property
    def generated(self) -> dict[str, bytes]:
        """The contents of generated files, by name."""
        return {path.removeprefix(GENERATED): content for path, content in self.texts.items()}

    @property
    def languages(self) -> set[str]:
        return languages([*self.sources, *self.texts])

    def document(self) -> dict[str, Any]:
        document = super().document()
        return {
            **document,
            "host": os.uname().machine,
            "sources": [*document["sources"], *map(self.portable, self.texts)],
            "archs": list(self.archs) if "cuda" in self.languages else None,
        }


def languages(paths: Iterable[str]) -> set[str]:
    """Return the languages of the sources among files."""
    return {
        LANGUAGES[suffix] for path in paths if (suffix := os.path.splitext(path)[1]) in LANGUAGES
    }


def describe(
    name: str,
    sources: Sequence[str | os.PathLike[str]],
    generated: Mapping[str, str],
    given: Mapping[str, Sequence[str]],
    include: Sequence[str | os.PathLike[str]],
    archs: Sequence[str] | None,
    launcher: Sequence[str],
    notes: Path | None,
) -> Library:
    """Describe the library that a call of `opjit.build` requests; see there for the arguments and errors."""
    lists = {
        "sources": sources,
        "include": include,
        "launcher": launcher,
        "archs": archs or (),
        **given,
    }
    paths = tuple(os.path.abspath(os.fspath(path)) for path in sources)
    problem = next(_problems(name, paths, generated, lists), None)
    if problem is not None:
        raise BuildError(
            f"opjit.build of {name!r}: {problem}", op=str(name), target="a shared library"
        )
    used = languages([*paths, *generated])
    found_archs = _archs(name, archs, given["cuda_cflags"]) if "cuda" in used else ()
    line = CommandLine(os.getcwd())
    flags = {kind: line.add([shlex.quote(word) for word in words]) for kind, words in given.items()}
    named = [
        *(os.path.abspath(os.fspath(folder)) for folder in include),
        *line.include,
        *map(os.path.dirname, line.forced),
    ]
    texts = {
        GENERATED + each: text.encode("utf-8", "surrogateescape")
        for each, text in sorted(generated.items())
    }
    return Library(
        name,
        paths,
        tuple(line.forced),
        texts,
        flags,
        tuple(line.archives()),
        tuple(dict.fromkeys(named)),
        {},
        _compilers(used, notes),
        given,
        found_archs,
        tuple(launcher),
    ).scanned()


def _problems(
    name: str, paths: Sequence[str], generated: Iterable[str], lists: Mapping[str, Sequence[Any]]
) -> Iterator[str]:
    """Say what is wrong with the arguments of `opjit.build`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield "expected a name of at most 100 letters, digits and '_.-', with a letter, a digit or '_' first"
    for parameter, value in lists.items():
        if isinstance(value, (str, bytes)):
            yield f"{parameter} is one string, {value!r}; expected a list of them"
    for path in paths:
        if os.path.splitext(path)[1] not in LANGUAGES:
            yield f"{path} has the suffix of no source; expected one of {' '.join(LANGUAGES)}"
        elif not os.path.isfile(path):
            yield f"there is no source {path}"
    if not languages([*paths, *generated]):
        yield f"it has no sources: name one or more files, or generated texts, with the suffixes {' '.join(LANGUAGES)}"
    for each in generated:
        if not _FILE.fullmatch(each):
            yield f"{each!r} cannot be the name of a generated file; expected a relative path of letters, digits and '_.+-'"
    for flag in (flag for kind in ("cflags", "cuda_cflags", "ldflags") for flag in lists[kind]):
        parts = re.split("[=,]", flag) if flag.startswith("-Xcompiler") else []
        if any(map(_UNSEEN.match, [flag, *parts])):
            yield f"the flag {flag} makes a tool run, read or write what the key does not cover; leave it out"


def _archs(name: str, given: Sequence[str] | None, flags: Iterable[str]) -> tuple[str, ...]:
    """Return the archs to compile CUDA code for; empty if the flags name them."""
    if given is None and any(map(NAMES_ARCH.match, flags)):
        return ()
    if given is None:
        given = re.split(
            r"[;+ ](?!PTX)",
            os.environ.get("OPJIT_ARCH") or os.environ.get("TORCH_CUDA_ARCH_LIST") or "",
        )
    found = list[str]()
    for each in filter(None, given):
        parts = _ARCH.fullmatch(each)
        if parts is None:
            raise UnknownArch(
                f"opjit.build of {name!r}: unknown CUDA arch {each!r}; expected one like sm_90a, 9.0a, 120f, 9.0+PTX or "
                "compute_90"
            )
        number = (parts[2] or f"{parts[3]}{parts[4]}") + parts[5]
        found += [f"{parts[1] or 'sm_'}{number}", *([f"compute_{number}"] if parts[6] else [])]
    if not found:
        raise UnknownArch(
            f"opjit.build of {name!r}: it has CUDA code and no arch; give archs=['9.0a'], say, or set OPJIT_ARCH=sm_90a"
        )
    return tuple(dict.fromkeys(found))


def _compilers(used: set[str], notes: Path | None) -> dict[str, str] | None:
    """Return the versions of the compilers of some languages, for the key; None if one is missing."""
    try:
        found = tools(used, notes, required=False)
    except ToolMissing:
        return None
    return None if None in found.values() else versions(found)


def tools(
    used: set[str], notes: Path | None, *, required: bool
) -> dict[str, Compiler | Nvcc | None]:
    """Return the compilers of some languages; nvcc needs one of C++. Raises ToolMissing, with what to install."""
    found: dict[str, Compiler | Nvcc | None] = {}
    if "c" in used:
        found["c"] = (
            toolchain.require_compiler(notes) if required else toolchain.find_compiler(notes)
        )
    if used & {"c++", "cuda"}:
        found["c++"] = toolchain.require_cxx(notes) if required else toolchain.find_cxx(notes)
    if "cuda" in used:
        found["cuda"] = toolchain.require_nvcc(notes) if required else toolchain.find_nvcc(notes)
    return found


def versions(found: Mapping[str, Compiler | Nvcc | None]) -> dict[str, str]:
    """Return the versions of compilers, by which a key names them."""
    return {
        language: tool.build if isinstance(tool, Nvcc) else f"{tool.version} for {tool.machine}"
        for language, tool in found.items()
        if tool is not None
    }

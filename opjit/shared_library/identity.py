"""The shared library that a call of `opjit.build` requests.

Its key does not contain torch, Python, paths or dates.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opjit.errors import BuildError, ToolMissing, UnknownArch
from opjit.files import StrPath
from opjit.recipe import nvcc_flags, reads, toolchain
from opjit.recipe.build_inputs import LIBRARY, UNNAMEABLE, ProjectInputs
from opjit.recipe.command_line import folders, portable, refused_flag, surroundings
from opjit.recipe.reads import GENERATED, Places
from opjit.recipe.toolchain import BuildTools, ToolVersions

LANGUAGES = {".c": "c", ".cc": "c++", ".cpp": "c++", ".cxx": "c++", ".cu": "cuda"}
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_FILE = re.compile(r"(\w[\w.+-]*/)*\w[\w.+-]*", re.ASCII)
NAMES_ARCH = re.compile("-gencode|--generate-code|-arch|--gpu-architecture")
_ARCH = r"(?:(sm_|compute_)?(\d{2,3})|(\d{1,2})\.(\d))([af]?)(\+PTX)?"


@dataclass(frozen=True)
class Library(ProjectInputs):
    """The inputs of a shared library's build, and the commands to compile it here.

    Its texts with a source's suffix are compiled after `sources`.
    """

    made_by = LIBRARY
    include: tuple[str, ...]  # folders of headers
    given: Mapping[str, Sequence[str]]  # the flags, by the parameters of `opjit.build`
    # Such as ``("sm_90a", "compute_90")``; empty without CUDA code, or if flags name them.
    archs: tuple[str, ...]
    # A program before each compiler, such as sccache; a script's text is in the key.
    launcher: tuple[str, ...]

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

    def own_fields(self) -> dict[str, Any]:
        fields = super().own_fields()
        return {
            **fields,
            "host": os.uname().machine,
            "sources": [*fields["sources"], *map(self.places.name, self.texts)],
            "archs": list(self.archs) if "cuda" in self.languages else None,
        }


def languages(paths: Iterable[str]) -> set[str]:
    """Return the languages of the sources among files."""
    return {
        LANGUAGES[suffix] for path in paths if (suffix := os.path.splitext(path)[1]) in LANGUAGES
    }


def describe(
    name: str,
    sources: Sequence[StrPath],
    generated: Mapping[str, str],
    given: Mapping[str, Sequence[str]],
    include: Sequence[StrPath],
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
    paths = tuple(reads.normalized(os.path.join(os.getcwd(), path)) for path in sources)
    problem = next(_problems(name, paths, generated, lists), None)
    if problem is not None:
        raise BuildError(
            f"opjit.build of {name!r}: {problem}", op=str(name), target="a shared library"
        )
    used = languages([*paths, *generated])
    words = [word for given_words in given.values() for word in given_words]
    archs = _archs(name, archs, given["cuda_cflags"]) if "cuda" in used else ()
    texts = {
        GENERATED + each: text.encode("utf-8", "surrogateescape")
        for each, text in sorted(generated.items())
    }
    tools: ToolVersions | None = None
    with suppress(ToolMissing):
        tools = versions(find_tools(used, notes))
    headers = tuple(reads.normalized(os.path.join(os.getcwd(), folder)) for folder in include)
    folder = os.path.dirname(paths[0]) if paths else os.sep
    searched = tuple(dict.fromkeys([*headers, *folders(words)]))
    linked = tuple(dict.fromkeys(folders(words, "L")))
    places = Places(folder, searched, linked, getattr(tools, "folders", ()))
    around = [*launcher, *toolchain.split_launcher("CC")[0], *toolchain.split_launcher("CXX")[0]]
    flags = {
        "include": [places.name(folder) for folder in headers],
        **{kind: portable(given_words, places) for kind, given_words in given.items()},
        **surroundings(words, around),
    }
    return Library(
        name=name,
        sources=paths,
        texts=texts,
        places=places,
        known={},  # until `now` reads the files
        toolchain=tools,
        doubt="",
        flags=flags,
        include=headers,
        given=given,
        archs=tuple(archs),
        launcher=tuple(launcher),
    ).now()


def _problems(
    name: str, paths: Sequence[str], generated: Iterable[str], lists: Mapping[str, Sequence[Any]]
) -> Iterator[str]:
    """Yield the problems of the arguments of `opjit.build`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield "expected a name of at most 100 letters, digits and '_.-', with a letter, a digit or '_' first"
    for parameter, value in lists.items():
        if isinstance(value, (str, bytes)):
            yield f"{parameter} is one string, {value!r}; expected a list of them"
    for path in paths:
        if UNNAMEABLE.search(path):
            yield (
                f"the path of its source, {path!a}, has a control character or a byte that is not UTF-8, which no build "
                "file can name; rename it"
            )
        elif os.path.splitext(path)[1] not in LANGUAGES:
            yield f"{path} has the suffix of no source; expected one of {' '.join(LANGUAGES)}"
        elif not os.path.isfile(path):
            yield f"there is no source {path}"
    if not languages([*paths, *generated]):
        yield f"expected sources; name one or more files, or generated texts, with the suffixes {' '.join(LANGUAGES)}"
    for each in generated:
        if not _FILE.fullmatch(each):
            yield f"{each!r} cannot be the name of a generated file; expected a relative path of letters, digits and '_.+-'"
    for kind in ("cflags", "cuda_cflags", "ldflags"):
        words = list(nvcc_flags.joined(lists[kind])) if kind == "cuda_cflags" else lists[kind]
        parts = [
            part
            for word in words
            for part in re.split("[=,]", word)
            if word.startswith("-Xcompiler")
        ]
        refused = refused_flag([*words, *parts[1:]])
        if refused is not None:
            yield f"{kind}: {refused}, which no list of inputs has; leave it out"
    for flag in lists["cuda_cflags"]:
        if re.search("[$`]", flag):
            yield f"nvcc passes {flag} to a shell, which expands it; write the value itself"


def _archs(name: str, given: Sequence[str] | None, flags: Iterable[str]) -> tuple[str, ...]:
    """Return the archs to compile CUDA code for; empty if the flags name them."""
    if given is None and any(map(NAMES_ARCH.match, flags)):
        return ()
    if given is None:
        given = re.split(
            r"[;+ ](?!PTX)",
            os.environ.get("OPJIT_ARCH") or os.environ.get("TORCH_CUDA_ARCH_LIST") or "",
        )
    found = []
    for each in filter(None, given):
        parts = re.fullmatch(_ARCH, each)
        if parts is None:
            raise UnknownArch(
                f"opjit.build of {name!r}: unknown CUDA arch {each!r}; expected one like sm_90a, 9.0a, 120f, 9.0+PTX or "
                "compute_90"
            )
        number = (parts[2] or f"{parts[3]}{parts[4]}") + parts[5]
        found += [f"{parts[1] or 'sm_'}{number}", *([f"compute_{number}"] if parts[6] else [])]
    if not found:
        raise UnknownArch(
            f"opjit.build of {name!r}: it has CUDA code but no arch; pass archs=, for example "
            "archs=['9.0a'], or set OPJIT_ARCH=sm_90a"
        )
    return tuple(dict.fromkeys(found))


def find_tools(used: set[str], notes: Path | None) -> BuildTools:
    """Return the compilers of some languages; nvcc needs one of C++. Raises ToolMissing, with what to install."""
    return BuildTools(
        toolchain.require_compiler(notes) if "c" in used else None,
        toolchain.require_cxx(notes) if used & {"c++", "cuda"} else None,
        toolchain.require_nvcc(notes) if "cuda" in used else None,
    )


def versions(tools: BuildTools) -> ToolVersions:
    """Return the versions of compilers, by which a key names them."""
    return toolchain.identity(tools.cc, tools.nvcc, tools.cxx)

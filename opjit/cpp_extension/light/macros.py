"""The macros that torch's headers define, printed by the compiler and kept once for each compiler, torch and set of flags.

The preprocessor needs a second for torch/extension.h, and 15 ms to define its macros again.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opjit.builder import parts, preprocessed
from opjit.cpp_extension.identity import own_folders, trusted_folders
from opjit.cpp_extension.light import vocabulary
from opjit.recipe import recorder
from opjit.recipe.compilers import Compiler

_DIRECTIVE = re.compile(rb"^[ \t]*#([^\n\\]*(?:\\[\s\S][^\n\\]*)*)", re.MULTILINE)
_WORD = rb"[A-Za-z_]\w*"
ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", re.MULTILINE)
_NAMES_OF_COMMANDS = """
    TORCH_API_INCLUDE_EXTENSION_H _GLIBCXX_USE_CXX11_ABI __CUDA_NO_HALF_OPERATORS__ __CUDA_NO_HALF_CONVERSIONS__
    __CUDA_NO_HALF2_OPERATORS__ __CUDA_NO_BFLOAT16_CONVERSIONS__
"""
OF_COMMANDS = frozenset(_NAMES_OF_COMMANDS.split())  # macros that flags of torch's commands define
# Flags that can have their value in the next word. They name files and directories, and the language.
TWO_WORDS = frozenset(["-isystem", "-iquote", "-idirafter", "-include", "-imacros", "-x"])
OWN_FLAGS = [word for folder in own_folders() for word in ("-isystem", folder)]
# Flags that neither define a macro nor change a macro of the compiler.
_SILENT = r"-(?:[WIL]|isystem|iquote|idirafter|f(?:file|macro|debug)-prefix-map|l|g)"


class Macros(NamedTuple):
    """The macros after some headers."""

    texts: Mapping[str, str]  # by name: the parameters, a blank and the replacement
    before: Mapping[str, str]  # the texts of macros that the headers undefine or redefine
    asked: frozenset[str]  # the words in the headers' directives, on which their macros depend
    read: frozenset[str]  # the paths of the files that the compiler read


class Surroundings(NamedTuple):
    """The text that the preprocessor has read before torch's headers, and the directories that it searches after theirs."""

    before: str = ""  # a text that is read before them
    flags: tuple[str, ...] = ()  # for folders that are searched later
    versions: tuple[str, ...] = ()  # of the files in these directories


def system_folders(flags: Sequence[str]) -> list[str]:
    """Return the directories that -isystem names in flags."""
    pairs = itertools.pairwise(flags)
    return [folder for flag, folder in pairs if flag == "-isystem"]


def after(
    names: Sequence[str], flags: Sequence[str], around: Surroundings, base: Path, cxx: Compiler
) -> Macros:
    """Return the macros after headers of torch that a file includes in this order.

    `flags` are the flags of the compile command that `heeded` keeps. `base` is the store's directory. Raises BuildError if the compiler
    fails, and OSError.
    """

    def compute(folder: Path) -> list[object]:
        included = "".join(f"#include <{name}>\n" for name in names)
        initial, _ = _dumped(around.before, flags, around, cxx, folder / "before")
        text = around.before + included
        final, read = _dumped(text, flags, around, cxx, folder / "after")
        asked = words_of(b"".join(map(_directives, read)))
        before = {name: text for name, text in initial.items() if final.get(name) != text}
        return [final, before, asked, read]

    content = ["macros 4", *vocabulary.versions(cxx), own_folders(), [*names], [*flags], [*around]]
    covered = trusted_folders(*system_folders(around.flags))
    texts, before, asked, read = parts.kept_json(base, content, covered, compute)
    return Macros(texts, before, frozenset(asked), frozenset(read))


def _dumped(
    text: str, flags: Sequence[str], around: Surroundings, cxx: Compiler, place: Path
) -> tuple[dict[str, str], list[str]]:
    """Return the macros after a text, and the files that the compiler read. It runs in a new folder `place`."""
    wanted = ["-E", "-dM", "names.cpp", "-o", "macros.txt"]
    place.mkdir()
    (place / "names.cpp").write_text(text)
    lacking = place / "lacking"
    searched = [*OWN_FLAGS, *around.flags, "-idirafter", str(lacking)]
    command = [cxx.path, "-x", "c++", "-w", *flags, *searched, *wanted]
    preprocessed.run_preprocessor(command, place, lacking, tuple(system_folders(searched)))
    opened = recorder.read([place / recorder.LOG]).opened
    printed = (place / "macros.txt").read_text("utf-8", "replace")
    read = [path for path, signed in opened.items() if signed and not path.startswith(str(place))]
    return {name: text for _, name, text in preprocessed.MACRO.findall(printed)}, read


@functools.cache
def _directives(path: str) -> bytes:
    """Return the directives of a header of torch, Python, CUDA or the system, each behind a blank."""
    return b" ".join([b"", *_DIRECTIVE.findall(Path(path).read_bytes())])


def words_of(text: bytes) -> list[str]:
    """Return the words of a text, sorted."""
    return sorted(map(bytes.decode, {*re.findall(_WORD, text)}))


def heeded(flags: Iterable[str], names: frozenset[str]) -> list[str]:
    """Return the flags that define one of some macros or change the compiler."""
    kept = []
    given = iter(flags)
    for flag in given:
        if flag in TWO_WORDS:
            next(given, None)
        elif flag.startswith(("-D", "-U")):
            name = re.split(r"[=(]", flag[2:])[0]
            if name in names:
                kept.append(flag)
        elif not re.match(_SILENT, flag):
            kept.append(flag)
    return kept

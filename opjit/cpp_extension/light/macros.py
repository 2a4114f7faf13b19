"""The macros that torch's headers leave behind, as the compiler itself prints them: kept once for each compiler, torch and set of flags.

torch/extension.h takes the preprocessor a second, whatever a program does with it. Its macros take 15 ms to define again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opjit.builder import runtime_objects
from opjit.cpp_extension.light import headers, vocabulary
from opjit.recipe import headers as scanner
from opjit.recipe.toolchain import Compiler

_FILE = "macros.json"
_DEFINE = re.compile(r"^#define (\w+)(.*)$", re.MULTILINE)
_DIRECTIVE = re.compile(rb"^[ \t]*#((?:[^\n\\]|\\.|\\\n)*)", re.MULTILINE)
_WORD = re.compile(rb"[A-Za-z_]\w*")
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", re.MULTILINE)
# Flags whose value may be the next word. They name files and folders, and the language.
TWO_WORDS = frozenset(["-isystem", "-iquote", "-idirafter", "-include", "-imacros", "-x"])
# Flags that neither define a macro nor change one that the compiler defines.
_SILENT = re.compile(r"-(?:[WIL]|isystem|iquote|idirafter|f(?:file|macro|debug)-prefix-map|l|g)")


class Macros(NamedTuple):
    """The macros after some headers."""

    texts: Mapping[str, str]  # by name: the parameters, a blank and the replacement
    removed: frozenset[str]  # those that the compiler defines and the headers undefine
    asked: frozenset[str]  # the words in the headers' directives, on which their macros depend
    read: frozenset[str]  # the paths of the files that the compiler read


def defined(text: str) -> dict[str, str]:
    """Return the macros in a compiler's output with ``-dM``."""
    return dict(_DEFINE.findall(text))


def after(
    names: Sequence[str], flags: Sequence[str], folders: Sequence[str], base: Path, cxx: Compiler
) -> Macros:
    """Return the macros after headers of torch that a file includes in this order.

    `flags` are the compile command's without ``-D`` of words that these headers never mention, which `heeded` leaves out. `folders` are
    searched as system headers. `base` is the store's folder. Raises BuildError if the compiler fails, and OSError."""

    def make(staged: Path) -> None:
        included = "".join(f"#include <{name}>\n" for name in names)
        initial = _dumped("", flags, folders, staged, cxx)
        final = _dumped(included, flags, folders, staged, cxx)
        read = scanner.read_dependencies((staged / "read.d").read_text("utf-8", "surrogateescape"))
        (staged / "read.d").unlink()
        asked = _asked(path for path in read if path.is_absolute())
        (staged / "names.cpp").unlink()
        removed = sorted(initial.keys() - final.keys())
        (staged / _FILE).write_text(json.dumps([final, removed, asked, sorted(map(str, read))]))

    content = ["macros", *vocabulary.versions(cxx), [*names], [*flags], [*folders]]
    place = runtime_objects.kept(base, content, (_FILE,), make)
    texts, removed, asked, read = json.loads((place / _FILE).read_text())
    return Macros(texts, frozenset(removed), frozenset(asked), frozenset(read))


def _dumped(
    text: str, flags: Sequence[str], folders: Sequence[str], staged: Path, cxx: Compiler
) -> dict[str, str]:
    (staged / "names.cpp").write_text(text)
    system = [word for folder in folders for word in ("-isystem", folder)]
    wanted = ["-E", "-dM", "-MD", "-MF", "read.d", "names.cpp", "-o", "macros.txt"]
    runtime_objects.run(cxx, ["-w", *flags, *system, *wanted], staged)
    printed = staged / "macros.txt"
    found = defined(printed.read_text("utf-8", "replace"))
    printed.unlink()
    return found


def _asked(paths: Iterable[Path]) -> list[str]:
    words = set[bytes]()
    for path in paths:
        for directive in _DIRECTIVE.findall(path.read_bytes()):
            words.update(_WORD.findall(directive))
    return sorted(word.decode() for word in words)


def heeded(flags: Iterable[str], asked: frozenset[str] | None) -> list[str]:
    """Return the flags that can change the macros of headers.

    `asked` are the words of these headers' directives. With None, no flag that defines a macro is returned."""
    kept = []
    given = iter(flags)
    for flag in given:
        if flag in TWO_WORDS:
            next(given, None)
        elif flag.startswith(("-D", "-U")):
            name = re.split(r"[=(]", flag[2:])[0]
            if asked is not None and name in asked:
                kept.append(flag)
        elif not _SILENT.match(flag):
            kept.append(flag)
    return kept


def is_read_once(name: str) -> bool:
    """Whether a header of torch has ``#pragma once``, so that the second inclusion of it has no effect."""
    return _ONCE.search(headers.text_of(name) or "") is not None

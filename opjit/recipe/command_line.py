"""The flags of compilers and linkers as a key has them: in order, with portable names in place of folders."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence

from opjit.backends import cpu
from opjit.recipe import toolchain
from opjit.recipe.reads import Places

_FOLDER = re.compile(r"-(I|isystem|iquote|idirafter|L)(.*)", re.DOTALL)
# Flags that load code which nothing records, that write more files, or that make another output.
_FLAGS = {
    r"-f(plugin|modules?\b|offload).*|-Wl,.*-plugin.*|-Xclang.*|-load.*|-mllvm": "a plug-in",
    r"-Wp,.*|-M.*|-save-temps.*|-dump(dir|base).*|-fdump.*|-ftest-coverage|--coverage|-fprofile-(arcs|generate).*": (
        "a file that it writes"
    ),
    r"-o|-o.*|-c|-S|-E|-x|-x.*|-###|--?keep.*|--?dryrun|-run|--run": "another output",
}
_REFUSED = [(re.compile(pattern, re.DOTALL), what) for pattern, what in _FLAGS.items()]


def split(flags: Sequence[str]) -> list[str]:
    """Split flags into words, like the shell."""
    try:
        return shlex.split(" ".join(flags))
    except ValueError:  # a quote is not closed, which the shell will report
        return list(flags)


def folders(
    words: Iterable[str], kinds: str = "I isystem iquote idirafter", start: str = ""
) -> list[str]:
    """Return the absolute paths of the folders of some kinds that flags name, in order; relative ones begin in the folder `start`."""
    found = []
    option = ""
    for word in words:
        named = _FOLDER.fullmatch(word)
        if option:
            found.append(os.path.abspath(os.path.join(start, word)))
            option = ""
        elif named and named[1] in kinds.split():
            option = "" if named[2] else named[1]
            found += [os.path.abspath(os.path.join(start, named[2]))] if named[2] else []
    return found


def portable(words: Sequence[str], places: Places, start: str = "") -> list[str]:
    """Return words with the names of folders in place of their paths; relative ones begin in the folder `start`."""

    def name(folder: str) -> str:
        return places.name(os.path.abspath(os.path.join(start, folder)))

    found = []
    before = None
    for word in words:
        named = None if before else _FOLDER.fullmatch(word)
        if before:
            found.append(name(word))
        elif named and named[2]:
            found.append(f"-{named[1]}{name(named[2])}")
        else:
            found.append(word)
        before = named if named and not named[2] else None
    return found


def surroundings(words: Sequence[str], launcher: Iterable[str]) -> dict[str, list[str]]:
    """Return the parts of a key for words that mean something else on another CPU, and for scripts before the compiler."""
    found = {
        "launcher": toolchain.launcher_texts(launcher),
        "native": [cpu.identity()] if any("native" in word for word in words) else [],
    }
    return {kind: parts for kind, parts in found.items() if parts}


def refused_flag(words: Iterable[str]) -> str | None:
    """Return the first flag that opjit cannot account for, with the reason, or None."""
    before = ""
    for word in words:
        joined = f"{before}={word}" if before in ("-Xlinker", "-Xassembler") else word
        for pattern, what in _REFUSED:
            if pattern.fullmatch(joined):
                return f"{word} brings in {what}"
        before = word
    return None

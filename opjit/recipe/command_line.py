"""The flags of compilers and linkers as a key has them: in order, with portable names in place of folders."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence

from opjit.backends import cpu
from opjit.recipe import toolchain
from opjit.recipe.reads import Places

_FOLDER = re.compile(r"-(I|isystem|iquote|idirafter|L)(.*)", re.DOTALL)
# Words with the same meaning in any working folder. One that is not here, as a key sees it, may
# name a file from there.
_OF_LINKER = (
    r"-z|defs|now|relro|-s|-O\d|-l[\w.+-]+|-soname|-Bsymbolic(-functions)?|-B(static|dynamic)|"
    r"-?-(no-)?(as-needed|undefined|whole-archive|gc-sections)|-?-(hash-style|build-id)(=\w+)?"
)
_PLAIN = re.compile(
    r"-[DU][A-Za-z_]\w*(\([\w, ]*\))?(=.*)?|-[OWgm][\w=.+-]*|-w|-f[\w-]+(=[\w-]+)?|-std=[\w+]+|-pthread|-pipe|-s|-shared|"
    rf"-rdynamic|-l[\w.+-]+|-Wl(,({_OF_LINKER}))+|-Xcompiler|-Xptxas|--use_fast_math|-lineinfo|-rdc=\w+|"
    r"-gencode=[\w=,]+|-arch=\w+|--expt-[\w-]+",
    re.DOTALL,
)


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


def is_same_anywhere(words: Sequence[str], places: Places) -> bool:
    """Return whether words mean the same in any working folder."""
    named = [_FOLDER.fullmatch(word) for word in words]
    relative = any(each and each[2] and not os.path.isabs(each[2]) for each in named)
    apart = any(each and not each[2] for each in named)
    return not (relative or apart or here(words, places))


def surroundings(
    words: Sequence[str], places: Places, launcher: Iterable[str]
) -> dict[str, list[str]]:
    """Return the parts of a key for words that mean something else in another folder or on
    another CPU, and for scripts before the compiler.
    """
    found = {
        "folder": here(words, places),
        "launcher": toolchain.launcher_texts(launcher),
        "native": [cpu.identity()] if any("native" in word for word in words) else [],
    }
    return {kind: parts for kind, parts in found.items() if parts}


def here(words: Sequence[str], places: Places) -> list[str]:
    """Return the name of the working folder if a word may have a different meaning in another
    folder, otherwise an empty text.
    """
    before = ""
    for word in words:
        of_folder = _FOLDER.fullmatch(before) or _FOLDER.fullmatch(word)
        plain = of_folder or _PLAIN.fullmatch(word)
        if not plain and not (os.path.isabs(word) and before not in ("-include", "-imacros")):
            return [places.name(os.getcwd())]
        before = word
    return []

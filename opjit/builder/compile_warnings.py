"""The warnings of a build that succeeded: those about the author's files, each once, at the author's line."""

import linecache
import re
import warnings
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from opjit.errors import CompileWarning

_WARNING = r"(?P<file>[^\s:(][^:(]*)(?::(?P<line>\d+)(?::\d+)?: |\((?P<row>\d+)\): )warning(?: #[\w-]+)?: (?P<text>.+)"
_NOTE = re.compile(r"(?P<file>[^\s:][^:]*):(?P<line>\d+):\d+: note: (?P<text>.+)")
_OF_PTXAS = r"ptxas(?P<where> .*)?warning ?: (?P<text>.+)"
# Not part of the key, because they change no byte; before an author's flags, so that they can change them.
DEFAULT = (f"-Wframe-larger-than={1 << 20}", "-Wformat")
_IS_LARGE = r"(the|stack) frame size .*\[-Wframe-larger-than=?\]"
_ADVICE = (
    ": a thread's stack has some MB, and a stack overflow kills the process with SIGSEGV; "
    "allocate the memory with opjit_scratch, or pass extra_cflags=['-Wno-frame-larger-than']"
)


class CompilerWarning(NamedTuple):
    """A warning, and its place in a file of the author's."""

    file: str
    line: int
    text: str


def find_warnings(
    output: str, own: Callable[[str], str | None], source: str
) -> list[CompilerWarning]:
    """Return the warnings about the author's files in compilers' output, each once, one about a macro of opjit's at the line that uses it.
    `own` gives the path of a file that a compiler names, if it is the author's; `source` is the place of warnings without one."""
    found = dict[CompilerWarning, None]()
    lines = output.splitlines()
    for index, line in enumerate(lines):
        match, of_ptxas = re.match(_WARNING, line), re.match(_OF_PTXAS, line)
        if match:
            excerpt = takewhile(
                lambda line: line.startswith(" ") or _NOTE.match(line), lines[index + 1 :]
            )
            notes = filter(None, map(_NOTE.match, excerpt))
            places = [
                (own(place["file"]), int(place["line"] or match["row"]))
                for place in (match, *notes)
            ]
            place = next(((file, number) for file, number in places if file), None)
            if place is not None:
                advice = _ADVICE if re.match(_IS_LARGE, match["text"]) else ""
                found[CompilerWarning(str(place[0]), place[1], match["text"] + advice)] = None
        elif of_ptxas:
            found[CompilerWarning(source, 1, f"ptxas: {of_ptxas['text']}")] = None
    return list(found)


def emit(
    found: Iterable[CompilerWarning], source: Path, place: Callable[[int], tuple[str, int]] | None
) -> None:
    """Give Python's warnings, at the author's lines. `place` gives the file and line of an inline source's line.

    Without such a file, the message has the line's text.
    """
    for each in found:
        file, line, text = each
        if place is not None and file == str(source):
            file, line = place(line)
            if not linecache.getlines(file):
                text += f"\n  {linecache.getline(str(source), each.line).strip()}"
        warnings.warn_explicit(CompileWarning(text), CompileWarning, file, line)

"""The output of a C++ preprocessor: its parts, and a text that compilers of both halves of a .cu
file accept.

nvcc preprocesses a .cu file with the C++ compiler, once for the host and once for each arch, and
only then divides it. opjit does the same, so no ``#if``, ``##`` or ``#`` of the author's is decided
by NVRTC, which has other macros. A flat text has the author's files with all macros expanded, and a
line for each foreign header, which the compiler of each half reads in a separate version.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from opjit.builder.compile_step import CompilerFailed, run_tool

_MARKER = re.compile(r'^# (\d+) "((?:[^"\\\n]|\\.)*)"([ \d]*)\n', re.MULTILINE)
MACRO = re.compile(r"^#(define|undef) (\w+)(.*)$", re.MULTILINE)
_INCLUDE = r'#[ ]*(?:include|include_next|import)\b\s*([<"])([^>"]+)[>"]'
_UPWARDS = r"^(?:\.\.?/)+"
_LACKING = re.compile(
    r"^(/[^\n:]+):\d+:\d+: fatal error: '?([\w./-]+)(?:: No such file|' file not found)",
    re.MULTILINE,
)
_FILLED = 8  # lines that are skipped without a directive, like by the C++ compiler


def run_preprocessor(
    command: Sequence[str], work: Path, lacking: Path, theirs: tuple[str, ...]
) -> None:
    """Run a preprocessor in a folder.

    If a foreign header includes a header that does not exist, the missing header becomes an empty
    file in the folder `lacking`, which the command searches last, because nvcc would not find it
    either.

    `theirs` are the prefixes of the paths of these headers. Raises CompilerFailed if the author's text is refused."""
    theirs += tuple(map(os.path.realpath, theirs))  # by which GCC names headers of the system
    while True:
        try:
            run_tool(command, work)
            return
        except CompilerFailed as failed:
            missing = _LACKING.search(str(failed))
            if missing is None or not missing[1].startswith(theirs):
                raise
            place = lacking / missing[2]
            if place.exists():  # and the compiler does not find it there
                raise
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


class Piece(NamedTuple):
    """A part of a preprocessor's output: its file, the number of its first line there, and its
    start and end in the output.
    """

    path: str
    number: int
    system: bool  # whether the compiler treats the file as a header of the system
    start: int
    end: int

    def is_authors(self, theirs: tuple[str, ...], users: tuple[str, ...]) -> bool:
        """Whether it is the author's: not below a path of `theirs`, and a header of the system only below one of `users`."""
        if self.path.startswith((*theirs, "<")):
            return False
        return not self.system or self.path.startswith(users)


@functools.lru_cache(maxsize=1)
def pieces_of(output: str) -> Sequence[Piece]:
    """Return the parts of a preprocessor's output."""
    found = []
    system = dict[str, bool]()
    markers = [*_MARKER.finditer(output)]
    ends = [*(marker.start() for marker in markers[1:]), len(output)]
    for marker, end in zip(markers, ends, strict=True):
        path = re.sub(r"\\(.)", r"\1", marker[2])
        flags = marker[3].split()
        if "1" in flags:  # only there; elsewhere a macro of the system makes the compiler report it
            system[path] = "3" in flags
        found.append(Piece(path, int(marker[1]), system.get(path, False), marker.end(), end))
    return found


def flatten(
    output: str,
    theirs: tuple[str, ...],
    users: tuple[str, ...],
    shown: Callable[[str], str],
    given: Mapping[str, str],
) -> str:
    """Return the author's files of a preprocessor's output with ``-dD -dI`` in one text, all macros expanded.

    Other headers stay ``#include`` lines, around which the author's macros are defined, as they are for these headers in a compiler.
    `theirs` and `users` tell which files these are, see `Piece`. `shown` gives the name of a file in messages. `given` has the macros that
    flags define: by name, the text behind ``#define``."""
    own = [piece for piece in pieces_of(output) if piece.number and piece.is_authors(theirs, users)]
    files = frozenset(piece.path for piece in own)
    macros = dict(given)
    flat = _FlatText(shown)
    for piece in own:
        flat.move_to(piece.path, piece.number)
        for line in output[piece.start : piece.end].split("\n")[:-1]:
            macro = MACRO.match(line)
            include = re.match(_INCLUDE, line)
            if macro is not None:
                if macro[1] == "define":
                    macros[macro[2]] = macro[2] + macro[3]
                else:
                    macros.pop(macro[2], None)
                flat.add("")
            elif include is None:
                flat.add(line)
            elif include[2] in files or any(
                path.endswith("/" + re.sub(_UPWARDS, "", include[2])) for path in files
            ):
                flat.add("")
            else:
                defined = [f"#define {text}" for text in macros.values()]
                undefined = [f"#undef {name}" for name in macros]
                flat.add_apart([*defined, line, *undefined])
    return flat.text()


@dataclass
class _FlatText:
    """A text in progress, with directives that map each of its lines to a line of a file."""

    shown: Callable[[str], str]
    lines: list[str] = field(default_factory=list)
    path: str = ""
    number: int = 0  # of the next line

    def move_to(self, path: str, number: int) -> None:
        """Let the next line be one of a file."""
        ahead = number - self.number
        if path == self.path and 0 <= ahead <= _FILLED:
            self.lines += [""] * ahead
        elif path == self.path and ahead == -1 and not self.lines[-1].startswith("#"):
            self.lines[-1] += " \\"  # the line goes on; `text` joins it
        else:
            name = self.shown(path).replace("\\", r"\\").replace('"', r"\"")
            self.lines.append(f'#line {number} "{name}"')
        self.path = path
        self.number = number

    def add(self, line: str) -> None:
        """Add a line."""
        if self.lines and self.lines[-1].endswith(" \\") and not line.startswith("#"):
            self.lines[-1] = f"{self.lines[-1][:-2].rstrip()} {line.lstrip()}"
        else:
            self.lines.append(line)
        self.number += 1

    def add_apart(self, lines: Iterable[str]) -> None:
        """Add lines that belong to no line of the file but one."""
        following = self.number + 1
        self.lines += lines
        path = self.path
        self.path = ""
        self.move_to(path, following)

    def text(self) -> str:
        """Return the text."""
        return "\n".join([*self.lines, ""]).replace(" \\\n", "\n")

"""Compares the preprocessed text of a program with torch's headers and with light headers.

Light headers have torch's declarations, but fewer macros. This does not change a program if the author's files have the same tokens after
both kinds of preprocessing, because then no ``#if``, ``##``, ``#`` or expansion depends on a macro that light headers lack.

The comparison does not need to read torch's headers. A directory of stubs, which is searched first, has a file for each header of torch
that the program includes. That file defines the macros that the header leaves behind (see `macros`). This is exact if torch's headers
don't test a macro that the program defines before them. Otherwise the stubs include torch's headers, which costs a second.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from opjit.builder import preprocessed
from opjit.builder.compile_step import CompilerFailed
from opjit.builder.diagnosis import unclosed
from opjit.builder.preprocessed import MACRO, Piece, pieces_of
from opjit.builder.tokens import code_of, tokenize
from opjit.cpp_extension.identity import own_folders
from opjit.cpp_extension.light import headers, macros
from opjit.cpp_extension.light.core import Core
from opjit.cpp_extension.light.macros import Macros, Surroundings, system_folders
from opjit.recipe.compilers import Compiler

_JOINED = frozenset(["-I", "-D", "-U"])  # flags that are joined with their value here
_DROPPED = frozenset(["-o", "-MF", "-MT", "-MQ"])  # with the word behind them
_SINGLE = "-c -S -E -M -MM -MD -MMD -MG -MP"
_PINNED = "PYBIND11_MODULE"  # a word of both texts, because opjit's binding defines it differently
# Each use of this macro gives the next number, so it stays a word in both texts: torch's macros make names of it.
COUNTED = ("-D__COUNTER__=__COUNTER__",)
COUNTS = re.compile(r"\b(?:__COUNTER__|C10_UID)\b")
_TRIES = 6
# Headers of torch that the author's headers often include. Any other costs a pass without its stub.
_OFTEN = "torch/extension.h torch/all.h torch/types.h torch/library.h ATen/ATen.h"
PASTES = re.compile(r"\s*(?:##|%:%:)\s*")


class TextLine(NamedTuple):
    """A line of a preprocessed file."""

    path: str
    number: int
    text: str


class Different(Exception):
    """A text has other tokens with torch's headers than with light headers. The message names the place."""


def flags_of(words: Sequence[str], source: str) -> list[str]:
    """Return the words of a compile command, without the compiler, that matter to the preprocessor, in order."""
    kept = []
    given = iter(words)
    for word in given:
        if word in _DROPPED:
            next(given, None)
        elif word in _JOINED:
            kept.append(word + next(given, ""))
        elif word in macros.TWO_WORDS:
            kept += [word, next(given, "")]
        elif word not in _SINGLE.split() and word != source and not word.endswith(".rsp"):
            kept.append(word)
    return kept


def compare(torchs: Sequence[TextLine], lights: Sequence[TextLine]) -> None:
    """Raise Different unless both are the same tokens."""
    if [line.text for line in torchs] == [line.text for line in lights]:
        return
    first = _tokens(torchs)
    second = _tokens(lights)
    if [token for token, _ in first] == [token for token, _ in second]:
        return
    at = 0
    while at < min(len(first), len(second)) and first[at][0] == second[at][0]:
        at += 1
    line = (first[at] if at < len(first) else second[at])[1]
    shown = [" ".join(token for token, _ in stream[at : at + 8]) for stream in (first, second)]
    place = f"{Path(line.path).name}:{line.number}"
    raise Different(
        f"a macro has another meaning with torch/extension.h: at {place} it makes `{shown[0] or 'nothing'}`, "
        f"and light headers make `{shown[1] or 'nothing'}`"
    )


def require_braces(source: Path, lines: Iterable[TextLine]) -> None:
    """Raise CompilerFailed if the preprocessed text of a source has more opening than closing braces."""
    text = "\n".join(line.text for line in lines)
    if text.count("{") <= text.count("}"):
        return
    code = code_of(text, "string", "char")
    if code.count("{") > code.count("}"):
        raise CompilerFailed(unclosed(source) or "a brace is not closed")


def _tokens(lines: Iterable[TextLine]) -> list[tuple[str, TextLine]]:
    return [
        (part, line)
        for line in lines
        for token in tokenize(line.text)
        for part in (token.text.split() if token.kind == "directive" else [token.text])
    ]


@dataclass(frozen=True)
class Preprocessor:
    """Preprocesses one source of a program.

    `base` is the store's directory, `work` the directory in which the compile command with `flags` runs, and `scratch` a directory for
    files. Paths that start with one of `theirs` are not the author's. Paths that start
    with one of `users` are, even if the compiler treats them as system headers.
    """

    cxx: Compiler
    base: Path
    work: Path
    scratch: Path
    flags: Sequence[str]
    source: str
    around: Surroundings
    theirs: tuple[str, ...]
    users: tuple[str, ...] = ()
    _states: dict[tuple[str, ...], Macros] = field(default_factory=dict)
    _named: dict[str, None] = field(default_factory=dict)  # the headers of torch that have stubs

    def text_with_torchs(self, more: Sequence[str] = ()) -> str:
        """Return the preprocessed text with torch's headers, without reading these if that is exact.

        `more` are flags. Raises CompilerFailed."""
        wanted = ["-dD", *more]
        source = Path(self.work, self.source)
        included = headers.includes(headers.code_of([source.read_text("utf-8", "replace")]))
        named = [name for name in included if headers.text_of(name) is not None]
        self._named.update(dict.fromkeys([*named, *_OFTEN.split()]))
        order = tuple(named[:1])
        for _ in range(_TRIES):
            text = self.run(self._stubs(order), more=wanted)
            beyond = self._without_stub(text)
            if beyond:
                self._named.update(dict.fromkeys(beyond))
                continue
            entered = self._entered(text)
            unknown = [name for name in entered if not self._is_there(name, order)]
            if not unknown and [name for name in entered if name in order] == list(order):
                if self._meets_own_macro(text, order):
                    break
                return text
            order = self._needed(entered)
        return self.run(self.real(), more=wanted)

    def _without_stub(self, text: str) -> list[str]:
        """Return the headers of torch that the author's files include and that were read, because their stubs are missing."""
        found = []
        torchs = tuple(f"{folder}/" for folder in own_folders())
        by_author = True
        for piece in pieces_of(text):
            if piece.path.startswith(torchs) and by_author:
                folder = next(each for each in torchs if piece.path.startswith(each))
                name = piece.path.removeprefix(folder)
                if headers.text_of(name) is not None and name not in self._named:
                    found.append(name)
            by_author = self._is_authors(piece)
        return found

    def _needed(self, entered: Sequence[str]) -> tuple[str, ...]:
        """Return the headers that define macros which the headers before them do not define."""
        order: tuple[str, ...] = ()
        for name in entered:
            if not self._is_there(name, order):
                order = (*order, name)
        return order

    def _is_there(self, name: str, order: tuple[str, ...]) -> bool:
        """Whether a header is in `order`, or is read once by a header in it."""
        if name in order:
            return True
        if not order or not macros.ONCE.search(headers.text_of(name) or ""):
            return False
        read = self._state(order).read
        return any(f"{folder}/{name}" in read for folder in own_folders())

    def _state(self, order: tuple[str, ...]) -> Macros:
        if order not in self._states:
            flags = macros.heeded(self.flags, macros.OF_COMMANDS)
            general = macros.after(order, flags, self.around, self.base, self.cxx)
            heeded = macros.heeded(self.flags, macros.OF_COMMANDS | general.asked)
            asked = [flag for flag in heeded if flag not in self.around.flags]
            self._states[order] = (
                macros.after(order, asked, self.around, self.base, self.cxx)
                if asked != flags
                else general
            )
        return self._states[order]

    def _stubs(self, order: tuple[str, ...]) -> dict[str, str]:
        """Return the text of each stub, if the headers of `order` are included in that order."""
        stubs = dict.fromkeys(self._named, "")
        before: Mapping[str, str] = {}
        for number, name in enumerate(order, 1):
            state = self._state(order[:number])
            gone = (before.keys() | state.before.keys()) - state.texts.keys()
            changed = [one for one, text in state.texts.items() if before.get(one) != text]
            lines = [f"#undef {one}\n" for one in sorted(gone)]
            lines += [f"#define {one}{state.texts[one]}\n" for one in changed]
            stubs[name] = "#pragma once\n" + "".join(lines)
            before = state.texts
        return stubs

    def run(
        self, stubs: Mapping[str, str], first: Sequence[str] = (), more: Sequence[str] = ()
    ) -> str:
        """Preprocess with a directory of stubs, which is searched first, and then `first`. Raises CompilerFailed."""
        for name, text in stubs.items():
            place = Path(self._stubs_folder, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{text}#undef {_PINNED}\n#define {_PINNED} {_PINNED}\n")
        printed = self.scratch / "preprocessed.ii"
        folders = [f"-I{folder}" for folder in (self._stubs_folder, *first)]
        lacking = self.scratch / "lacking"
        command = [self.cxx.path, "-w", *more, *folders, *self.flags]
        command.append("-fno-working-directory")  # with -g, a line would name a folder
        command += ["-idirafter", str(lacking), "-E", self.source, "-o", str(printed)]
        theirs = (*own_folders(), *system_folders(self.flags))
        preprocessed.run_preprocessor(command, self.work, lacking, theirs)
        if not printed.is_file():
            raise CompilerFailed(f"{self.source}: the compiler ignores it, because of its name")
        return printed.read_text("utf-8", "surrogateescape")

    @property
    def _stubs_folder(self) -> str:
        return f"{self.scratch}/stubs/"

    def real(self) -> dict[str, str]:
        """Return stubs that include the headers of the same names."""
        return {name: f"#include_next <{name}>\n" for name in self._named}

    def takes_first(self, text: str, core: Core) -> bool:
        """Whether the source is the same program if the core comes first. `text` is the result of `text_with_torchs`."""
        order = self._needed(self._entered(text))
        if not core.read <= self._state(order).read:
            return False
        made = dict[str, str | None]()
        for piece in pieces_of(text):
            if piece.path.startswith(self._stubs_folder):
                met = made.keys() & core.words
                return all(made[name] == core.after.get(name) for name in met)
            if piece.path.startswith("<"):  # macros of the compiler and of flags
                continue
            own = self._is_authors(piece)
            # It is one of the core's headers, or of the C++ library's.
            known = (piece.path, f"{os.path.dirname(piece.path)}/vector")
            if not own and core.read.isdisjoint(known):
                return False
            for line in text[piece.start : piece.end].split("\n"):
                macro = MACRO.match(line)
                if macro is not None:
                    made[macro[2]] = macro[3] if macro[1] == "define" else None
                elif own and line.strip():
                    return False
        return False

    def files_of(self, text: str) -> set[str]:
        """Return the paths of the author's files in a preprocessed text."""
        paths = {piece.path for piece in pieces_of(text) if self._is_authors(piece)}
        return {os.path.normpath(self.work / path) for path in paths}

    def _is_authors(self, piece: Piece) -> bool:
        return piece.is_authors((*self.theirs, self._stubs_folder), self.users)

    def lines_of(self, text: str) -> list[TextLine]:
        """Return the lines of the author's files that are not empty."""
        found = []
        for piece in pieces_of(text):
            if not self._is_authors(piece):
                continue
            lines = text[piece.start : piece.end].split("\n")
            for number, line in enumerate(lines, piece.number):
                if line.strip() and not MACRO.match(line):
                    found.append(TextLine(piece.path, number, line.strip()))
        return found

    def _entered(self, text: str) -> list[str]:
        """Return the headers with a stub that was read, in the order of their first inclusion."""
        paths = dict.fromkeys(piece.path for piece in pieces_of(text))
        folder = self._stubs_folder
        return [path.removeprefix(folder) for path in paths if path.startswith(folder)]

    def _meets_own_macro(self, text: str, order: tuple[str, ...]) -> bool:
        """Whether torch's headers test a macro that the program, or a header that is not torch's, has changed before them."""
        now = dict[str, str | None]()
        met = []
        for piece in pieces_of(text):
            name = piece.path.removeprefix(self._stubs_folder)
            if name != piece.path:
                if name in order and name not in met:
                    met.append(name)
                    if self._asks_for(self._state(order[: len(met)]), now):
                        return True
            elif not piece.path.startswith("<"):
                for kind, one, rest in MACRO.findall(text, piece.start, piece.end):
                    now[one] = rest if kind == "define" else None
        return False

    def _asks_for(self, state: Macros, now: Mapping[str, str | None]) -> bool:
        """Whether headers test a macro that has neither the text from before they were read alone nor the text that they define."""
        for name, text in now.items():
            if name not in state.asked or text == state.texts.get(name):
                continue
            if text is None or text != state.before.get(name):
                return True
        return False

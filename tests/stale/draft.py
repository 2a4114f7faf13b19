"""A program that is being drawn: pieces add files, lines, flags and variables to it, and the edits that it may get."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.stale.case import Content, State

Edit = Callable[["Draft"], None]


@dataclass
class Search:
    """A directory in the list that is searched for headers: its name, and the kind of its place, such as "-isystem" or "CPATH"."""

    directory: str
    kind: str


@dataclass
class Draft:
    """All lists are in the order of the request.

    Attributes:
        rng: draws.
        kind: how the program is built; a key of `ask.KINDS`.
        files: contents by path.
        lines: of the source, before its function.
        terms: expressions whose sum is the program's value, each a line or a conditional of lines.
        searched: the directories of headers.
        clock: whether the program has the time of its build.
        edits: names of edits, and functions that apply them to a copy.
    """

    rng: random.Random
    kind: str
    files: dict[str, Content] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    searched: list[Search] = field(default_factory=list)
    cflags: list[str] = field(default_factory=list)
    ldflags: list[str] = field(default_factory=list)
    generated: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)
    folder: str = "."
    clock: bool = False
    edits: list[tuple[str, Edit]] = field(default_factory=list)

    def number(self) -> int:
        """A number of two digits, so that an edit can keep the size of a file."""
        return self.rng.randrange(10, 100)

    def other(self, number: int) -> int:
        return 10 + (number - 10 + self.rng.randrange(1, 90)) % 90

    def choose(self, ways: Sequence[str]) -> str:
        """One of some words. Flags with a path from the current folder are for opjit.build alone: `load` compiles elsewhere."""
        here = [way for way in ways if "{here}" in way or self.kind in ("build", "objects")]
        return self.rng.choice(here)

    def chance(self, part: float) -> bool:
        return self.rng.random() < part

    def edit(self, name: str, change: Edit) -> None:
        self.edits.append((name, change))

    def writes(self, name: str, path: str, content: Content | None) -> None:
        """Add the edit that a file gets a content; None: it goes."""

        def change(draft: Draft) -> None:
            if content is None:
                draft.files.pop(path, None)
            else:
                draft.files[path] = content

        self.edit(name, change)

    def sets(self, name: str, flag: str) -> None:
        """Add the edit that a flag takes the place of the last one for the compiler."""
        place = len(self.cflags) - 1

        def change(draft: Draft) -> None:
            draft.cflags[place] = flag

        self.edit(name, change)

    def variable(self, name: str, variable: str, value: str | None) -> None:
        """Add the edit that a variable of the environment gets a value; None: it goes."""

        def change(draft: Draft) -> None:
            if value is None:
                draft.environment.pop(variable, None)
            else:
                draft.environment[variable] = value

        self.edit(name, change)

    def edited_by(self, change: Edit) -> "Draft":
        after = copy.deepcopy(self)
        change(after)
        return after

    def state(self) -> State:
        terms = "\n".join(f"+ {term}" if not term.startswith("#") else term for term in self.terms)
        source = "\n".join([*self.lines, "int value(void)", "{", "return 0", terms, ";", "}", ""])
        flags, include, variables = _searched(self.searched, self.kind)
        return State(
            files={**self.files, "a.c": source},
            cflags=(*flags, *self.cflags),
            ldflags=tuple(self.ldflags),
            include=tuple(include),
            generated=dict(self.generated),
            environment={**variables, **self.environment},
            launcher=tuple(self.launcher),
            folder=self.folder,
        )


KINDS_OF_SEARCH = (
    "include",
    "include",
    "include",
    "-I",
    "-I",
    "-I apart",
    "-I relative",
    "-isystem",
    "-isystem joined",
    "-iquote",
    "-idirafter",
    "--include-directory=",
    "--include-directory-after=",
    "prefix",
    "prefix before",
    "CPATH",
    "LANGUAGE_INCLUDE_PATH",
)
FLAGS = {
    "-I": ("-I{here}/%s",),
    "-I apart": ("-I", "{here}/%s"),
    "-I relative": ("-I%s",),
    "-isystem": ("-isystem", "{here}/%s"),
    "-isystem joined": ("-isystem{here}/%s",),
    "-iquote": ("-iquote", "{here}/%s"),
    "-idirafter": ("-idirafter", "{here}/%s"),
    "--include-directory=": ("--include-directory={here}/%s",),
    "--include-directory-after=": ("--include-directory-after={here}/%s",),
    "prefix": ("-iprefix", "{here}/", "-iwithprefix", "%s"),
    "prefix before": ("-iprefix", "{here}/", "-iwithprefixbefore", "%s"),
}


def _searched(searched: list[Search], kind: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Flags, include folders and variables that name the directories."""
    flags: list[str] = []
    include: list[str] = []
    variables: dict[str, list[str]] = {}
    own = "CPLUS_INCLUDE_PATH" if kind.startswith("load") else "C_INCLUDE_PATH"
    for each in searched:
        if each.kind == "include":
            include.append("{here}/" + each.directory)
        elif each.kind in FLAGS:
            flags += [word.replace("%s", each.directory) for word in FLAGS[each.kind]]
        else:
            name = own if each.kind == "LANGUAGE_INCLUDE_PATH" else each.kind
            variables.setdefault(name, []).append("{here}/" + each.directory)
    return flags, include, {name: ":".join(places) for name, places in variables.items()}

"""The table of known cases: each was once served stale, or is the plain form of one that was.

Sections: 1 generated files; 2 the caller's folders; 3 headers that appear for __has_include; 4 headers that appear in an earlier folder;
5 the assembler; 6 the linker; 7 the shell; 8 the compiler's surroundings; 9 others."""

from collections.abc import Iterator

from tests.stale import listed_headers, listed_tools
from tests.stale.case import Case, State, edited

KINDS = {"b": ("build", "objects"), "l": ("load", "load-objects"), "o": ("op",)}


def cases() -> Iterator[Case]:
    """All listed cases, row by row."""
    for row in (*listed_headers.rows(), *listed_tools.rows()):
        before = edited(State(files={"a.c": row.text}), **row.start)
        after = edited(before, **row.edit)
        for letter in row.kinds:
            for kind in KINDS[letter]:
                clock = row.name in ("__TIME__", "__DATE__")
                yield Case(f"{row.section} {row.name}", kind, before, after, clock=clock)

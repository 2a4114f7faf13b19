"""A row of a table of cases, and texts that rows share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.stale.case import Content

X = "int value(void) { return X; }\n"
ONE = "#define X 1\n"
TWO = "#define X 2\n"
HIDDEN = '__attribute__((visibility("hidden")))'


@dataclass(frozen=True)
class Row:
    """A case for some kinds.

    Attributes:
        section: of the findings.
        name: says what is odd, and the edit.
        kinds: letters; b: build and objects; l: load and load-objects; o: op.
        text: the source.
        edit, start: fields of the state; mappings are merged.
    """

    section: int
    name: str
    kinds: str
    text: str
    edit: Mapping[str, object]
    start: Mapping[str, object] = field(default_factory=dict)


def row(
    section: int, name: str, kinds: str, text: str, edit: Mapping[str, object], **start: object
) -> Row:
    return Row(section, name, kinds, text, edit, start)


def given(**files: Content | None) -> Mapping[str, Content | None]:
    """Files by names that are words: `a__x_h` is a/x.h."""
    paths = {name.replace("__", "/"): content for name, content in files.items()}
    return {".".join(path.rsplit("_", 1)): content for path, content in paths.items()}

"""``opjit port``: the edits that C++ and CUDA code for old versions of torch needs."""

import re
from pathlib import Path
from typing import NamedTuple

from opjit import resources
from opjit.builder.tokens import code_of


class Edit(NamedTuple):
    """An edit of a file's line."""

    file: str
    line: int
    found: str
    replacement: str
    reason: str

    def __str__(self) -> str:
        change = f"{self.found} -> {self.replacement or 'nothing'}"
        return f"{self.file}:{self.line}: {change} ({self.reason})"


def find_edits(path: Path) -> list[Edit]:
    """Return the edits of a C++ or CUDA file, in the order of the text, comments and strings excluded.

    Example:
        >>> print(*find_edits(Path("roi.cu")), sep="\\n")
        roi.cu:14: AT_CHECK -> TORCH_CHECK (AT_CHECK was removed)
    """
    text = path.read_text("utf-8", "replace")
    code = code_of(text, "string")
    found = dict[int, Edit]()
    for row in resources.template("port.txt").splitlines()[2:]:
        pattern, replacement, reason = row.split(" | ")
        for match in re.finditer(pattern, code):
            group = match.re.groupindex.get("at", 0)
            start = match.start(group)
            line = text.count("\n", 0, start) + 1
            edit = Edit(str(path), line, match[group], match.expand(replacement), reason)
            found.setdefault(start, edit)
    return [found[start] for start in sorted(found)]

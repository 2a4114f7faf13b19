"""The sources of an inline op: text, written to files for the compilers."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from opjit import files

_folders: dict[int, Path] = {}  # by process


class Code(NamedTuple):
    """The text of an inline op's sources; see `opjit.inline`."""

    texts: Mapping[str, str]  # the source for each file suffix
    module: str  # name of the declaring module; a later declaration there replaces this one
    shown: str | None = None  # the text's name in compiler messages; None is the file's name

    def write(self, name: str) -> Path:
        """Write the sources of an op, unless they are there, to a folder that is named after them, so that no compiler sees them change."""
        content = "\0".join([name, *(part for item in sorted(self.texts.items()) for part in item)])
        private = _folders.get(
            os.getpid()
        )  # a forked child makes its own: the parent removes its folder when it exits
        if private is None or not private.is_dir():
            private = _folders[os.getpid()] = files.temporary_folder("opjit-inline-")
        folder = private / hashlib.sha256(content.encode()).hexdigest()[:20]
        for suffix, text in self.texts.items():
            path = folder / f"{name}{suffix}"
            if not path.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                temporary = folder / f".{files.random_name()}"
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, path)
        return folder

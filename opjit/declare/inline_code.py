"""The sources of an inline op: text, written to files for the compilers."""

import linecache
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from opjit import backends, files
from opjit.backends import Backend
from opjit.files import StrPath

_folders: dict[int, Path] = {}  # by process


class Code(NamedTuple):
    """The text of an inline op's sources; see `opjit.inline`."""

    texts: Mapping[str, str]  # the source for each file suffix
    module: str  # name of the declaring module; a later declaration there replaces this one
    shown: str | None = None  # the text's name in compiler messages; None is the file's name
    program: str = ""  # the declaring call's file and line

    def backends(self) -> list[Backend]:
        """Return the backends that the code is for."""
        return [each for each in backends.all_backends() if each.suffix in self.texts]

    def place(self, name: str, suffix: str, line: int) -> tuple[str, int]:
        """Return the file and line of a source's line for messages: the program's, if it contains the source literally and once."""
        file = self.program.rpartition(":")[0]
        program = "".join(linecache.getlines(file))
        text = self.texts[suffix]
        if program.count(text) != 1:
            return self.shown or f"{name}{suffix}", line
        above = program[: program.index(text)].count("\n")
        return file, above + line

    def in_program(self, message: str, name: str) -> str:
        """Return a message with the program's place, and with its lines in place of a source's."""
        if not self.program:
            return message

        def replace(found: re.Match[str]) -> str:
            suffix = found[1]
            if suffix not in self.texts:
                return found[0]
            file, line = self.place(name, suffix, int(found[2]))
            return f"{file}:{line}"

        message = re.sub(rf"\b{name}(\.\w+):(\d+)", replace, message)
        return f"{message}\n{name} is inline code at {self.program}"

    def folder_in(self, parent: StrPath, name: str) -> Path:
        """Return the folder of an op's sources. It is named after them, so that no compiler sees them change."""
        content = "\0".join([name, *(part for item in sorted(self.texts.items()) for part in item)])
        return Path(parent, files.sha256(content)[:20])

    def write(self, name: str) -> Path:
        """Write the sources of an op, unless they are there, to a folder of this process."""
        # A forked child makes its own: the parent removes its folder when it exits.
        private = _folders.get(os.getpid())
        if private is None or not private.is_dir():
            private = _folders[os.getpid()] = files.temporary_folder("opjit-inline-")
        folder = self.folder_in(private, name)
        for suffix, text in self.texts.items():
            path = folder / f"{name}{suffix}"
            if not path.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                temporary = folder / f".{files.random_name()}"
                temporary.write_text(text, "utf-8")
                os.replace(temporary, path)
        return folder

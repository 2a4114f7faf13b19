"""The flags of compilers and linkers as a key has them, with contents in place of paths."""

import os
import re
import shlex

from opjit import files

_FOLDER = re.compile(r"-(I|isystem|iquote|idirafter|L)(.*)", re.DOTALL)


class CommandLine:
    """Collects folders of headers, in order, and files forced in, as flags name them. Folders of libraries start from `work`."""

    def __init__(self, work: str) -> None:
        self._work = work
        self.include: list[str] = []
        self.forced: list[str] = []
        self._libraries: list[str] = []
        self._searched: list[str] = []

    def add(self, flags: list[str]) -> list[str]:
        """Add a list of flags. Returns their words, as the shell splits them, without paths."""
        try:
            words = shlex.split(" ".join(flags))
        except ValueError:  # a quote is not closed, which the shell will report
            return flags
        return [self._word(before, word) for before, word in zip(["", *words], words, strict=False)]

    def _word(self, before: str, word: str) -> str:
        option, folder = _FOLDER.fullmatch(before), _FOLDER.fullmatch(word)
        if before in ("-include", "-imacros"):
            self.forced.append(os.path.abspath(word))
        elif option and not option[2]:
            self._folder(option[1], word)
        elif folder and folder[2]:
            self._folder(folder[1], folder[2])
            return f"-{folder[1]}<folder>"
        elif word.startswith("-l"):
            self._libraries.append(word[2:])
            return word
        elif word.startswith("-Wl,"):
            return "".join(_content(part) for part in re.split(r"([,=])", word))
        else:
            return _content(word)
        return "<path>"

    def _folder(self, kind: str, path: str) -> None:
        if kind == "L":
            self._searched.append(os.path.abspath(os.path.join(self._work, path)))
        else:
            self.include.append(os.path.abspath(path))

    def archives(self) -> list[str]:
        """Return the static libraries that the flags name. They become part of the binary."""
        names = [name[1:] if name.startswith(":") else f"lib{name}.a" for name in self._libraries]
        found = (os.path.join(folder, name) for name in names for folder in self._searched)
        return list(
            dict.fromkeys(path for path in found if path.endswith(".a") and os.path.isfile(path))
        )


def _content(word: str) -> str:
    """Return a file's digest in place of its path; the name of a shared library, which is looked up again when the binary is loaded."""
    path = word.removeprefix("@")
    if os.sep not in path or not os.path.isfile(path):
        return word
    return (
        f"<{os.path.basename(path)}>"
        if re.search(r"\.so(\.\d+)*$", path)
        else f"<{files.digest(path)}>"
    )

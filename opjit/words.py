"""The words of a compiler's and a linker's flags as a key has them: what a path in them names, instead of the path."""

import os
import re

from opjit import files

# A folder or a file that a flag names by its path; the path is no part of a key, what is found there is.
_FOLDER = r"-(I|isystem|iquote|idirafter|L)(.*)"  # a text, compiled where there are flags: it takes 0.1 ms, and a warm load takes ten
_FORCED = ("-include", "-imacros")


class Words:
    """Reads lists of flags, and collects the folders and files that they name.

    Attributes:
        include: folders of headers, in order.
        forced: files that a flag includes.
    """

    def __init__(self) -> None:
        self.include: list[str] = []
        self.forced: list[str] = []
        self._libraries: list[str] = []
        self._searched: list[str] = []

    def of(self, given: list[str]) -> list[str]:
        """The words of a list of flags, as the shell will see them."""
        if not given:
            return []
        import shlex  # not for a load without flags, which takes milliseconds

        try:
            split = shlex.split(" ".join(given))
        except ValueError:  # a quote that is not closed: the shell will say so
            return given
        words, before = [], ""
        for word in split:
            words.append(self._word(before, word))
            before = word
        return words

    def _word(self, before: str, word: str) -> str:
        folder = re.fullmatch(_FOLDER, word, re.DOTALL)
        if before in _FORCED:
            self.forced.append(os.path.abspath(word))
        elif before in ("-I", "-isystem", "-iquote", "-idirafter", "-L"):
            self._folder(before, word)
        elif folder and folder[2]:
            self._folder(f"-{folder[1]}", folder[2])
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
        (self._searched if kind == "-L" else self.include).append(os.path.abspath(path))

    def archives(self) -> list[str]:
        """Static libraries that the flags name: what is in them will be in the binary."""
        names = [name[1:] if name.startswith(":") else f"lib{name}.a" for name in self._libraries]
        found = (os.path.join(folder, name) for name in names for folder in self._searched)
        return list(dict.fromkeys(path for path in found if path.endswith(".a") and os.path.isfile(path)))


def _content(word: str) -> str:
    """A word that is a file's path becomes the file's digest; a shared library's becomes its name, as it is found anew when loaded."""
    path = word.removeprefix("@")
    if os.sep not in path or not os.path.isfile(path):
        return word
    return f"<{os.path.basename(path)}>" if re.search(r"\.so(\.\d+)*$", path) else f"<{files.digest(path)}>"

"""Inputs of a build that no tool reports: one table for ops, extensions, shared libraries and
cached object files.

Inputs that a text requests from the preprocessor are part of the key if opjit can find them.
Otherwise the binary is not cached. A flag that adds such an input is rejected if opjit made the
command line. If torch made it, the binary is not cached. `opjit why` gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Flags that make a tool read or run unreported files, and the kind of file.
_FLAGS = {
    r"@.*|-W[la],@.*|-X(linker|assembler)=@.*|-optf.*|--options-file.*": "a file of options",
    r"-f(plugin|auto-profile|profile-use|branch-probabilities|modules?\b|offload).*|-Wl,.*-plugin.*|-Xclang.*|-load.*|-mllvm": (
        "a plug-in or a profile"
    ),
    r"-f(use-ld|lto\b).*": "another linker, or code that the linker compiles",
    r"--?specs.*|-B.*|--prefix.*|-wrapper.*|--?gcc-toolchain.*|-ccbin.*|--compiler-bindir.*": "another compiler's parts",
    r"--?sysroot.*|-isysroot.*|-imultilib.*|-imultiarch.*": "another system's files",
    r"-Wp,.*|-M.*|-save-temps.*|-dump(dir|base).*|-fdump.*|-ftest-coverage|--coverage|-fprofile-(arcs|generate).*": (
        "a file that it writes"
    ),
    r"-o|-o.*|-c|-S|-E|-x|-x.*|-###|--?keep.*|--?dryrun|-run|--run": "another output",
}
_REFUSED = [(re.compile(pattern, re.DOTALL), what) for pattern, what in _FLAGS.items()]
# In a text: a macro of date and time, which compilations without warnings may use, and what may have
# the assembler read a file.
DATES = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")
ASSEMBLY = re.compile(rb"incbin|\.include")
DATE_WARNING = "-Wdate-time"  # which compilers give where one of these macros is used
_DATE_SEEN = re.compile(r"\[-W(?:error=)?date-time\]")
_ASKS = re.compile(rb"has_include|\b__has_\b(?![ \t]*##[ \t]*_)")
_WRAPPER = re.compile(
    rb"#[ \t]*define[ \t]+(\w+)\([ \t]*(\w+)[ \t]*\)[ \t]*\(?[ \t]*__has_include(?:_next)?[ \t]*\([ \t]*(\w+)[ \t]*\)"
)
ONCE = re.compile(rb"(?i:pragma)[^\n]*\bonce\b|_Pragma\s*\(\s*[^\"\s]|#\W*import\b")
_BLANK = rb"(?:[ \t\f\v]|/\*.*?\*/)*"
_INCLUDE = re.compile(
    rb"(?:#|%%:|\?\?=)%b(?:include_next\b|(?:import|include)\b%b(?:\"([^\"\n]+)\"|<([^>\n]+)>)?)"
    % (_BLANK, _BLANK),
    re.DOTALL,
)
_COMMENT = re.compile(rb"(?m)^([^\"\n]*?)//[^\n]*$|/\*.*?\*/", re.DOTALL)


class Asked(NamedTuple):
    """A header that a text includes, or tests for presence."""

    folder: str  # of the text
    quoted: bool
    name: str


def refused_flag(words: Iterable[str]) -> str | None:
    """Return the first flag that makes a tool read unreported files, with the reason, or None."""
    before = ""
    for word in words:
        joined = f"{before}={word}" if before in ("-Xlinker", "-Xassembler") else word
        for pattern, what in _REFUSED:
            if pattern.fullmatch(joined):
                return f"{word} brings in {what}"
        before = word
    return None


def used_date(output: str) -> str | None:
    """Say that a text uses a macro of date and time, by the compilers' warnings."""
    return "it uses __DATE__, __TIME__ or __TIMESTAMP__" if _DATE_SEEN.search(output) else None


def asked_headers(texts: Mapping[str, bytes]) -> tuple[set[Asked], str | None]:
    """Return the headers that texts test for presence, by the texts' folders, and the reason why
    some may be missing, or None if the list is complete.
    """
    joined = {path: _without_continuations(text) for path, text in texts.items()}
    asking = {path: _without_comments(text) for path, text in joined.items() if _ASKS.search(text)}
    wrappers = {
        found[1]
        for text in asking.values()
        for found in _WRAPPER.finditer(text)
        if found[2] == found[3]
    }
    using = {
        path: _without_comments(text)
        for path, text in joined.items()
        if path in asking or any(name in text for name in wrappers)
    }
    words = re.compile(
        rb"(?<!\w)(?:"
        + rb"|".join([rb"\w*has_include\w*", rb"__has_(?![ \t]*##[ \t]*_)", *sorted(wrappers)])
        + rb")(?!\w)"
    )
    asked = set[Asked]()
    for path, text in using.items():
        for line in filter(words.search, text.split(b"\n")):
            found = _asked_in(line, words, wrappers)
            if found is None:
                return asked, f"{path} tests for a header by __has_include without its name"
            asked |= {Asked(path.rpartition("/")[0], quoted, name) for quoted, name in found}
    return asked, None


def included_headers(texts: Mapping[str, bytes]) -> tuple[set[Asked], str | None]:
    """Return the headers that texts include, even in comments, and a text that includes one by a
    macro or by #include_next, or None.
    """
    included = set[Asked]()
    computed = None
    for path, text in texts.items():
        for found in _INCLUDE.finditer(_without_continuations(text)):
            name = found[1] or found[2]
            if name is None:
                computed = path
                continue
            folder = path.rpartition("/")[0]
            included.add(
                Asked(folder, found[1] is not None, name.decode("utf-8", "surrogateescape"))
            )
    return included, computed


def _without_continuations(text: bytes) -> bytes:
    """Return a text without continuations of lines."""
    return text.replace(b"\\\r\n", b"").replace(b"\\\n", b"")


def _without_comments(text: bytes) -> bytes:
    return _COMMENT.sub(lambda found: found[1] or b" ", text)


def _asked_in(
    line: bytes, words: re.Pattern[bytes], wrappers: set[bytes]
) -> list[tuple[bool, str]] | None:
    """Return the names in a line that tests for headers, or None if a name is not literal."""
    wrapper = _WRAPPER.search(line)
    if wrapper and wrapper[2] == wrapper[3] and not words.search(line[wrapper.end() :]):
        return []
    defined = re.match(rb"[ \t]*#[ \t]*(?:define|ifdef|ifndef|undef)[ \t]+(\w+)", line)
    if defined and not words.search(line[defined.end() :]):
        return []
    found = []
    for word in words.finditer(line):
        if re.search(rb"\bdefined[ \t]*\(?[ \t]*$", line[: word.start()]):
            continue
        literal = re.match(
            rb'[ \t]*\([ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)[ \t]*\)', line[word.end() :]
        )
        if literal is None or word[0] not in {*wrappers, b"__has_include", b"__has_include_next"}:
            return None
        name = literal[1] or literal[2]
        found.append((literal[1] is not None, name.decode("utf-8", "surrogateescape")))
    return found

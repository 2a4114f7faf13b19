"""The files of a kernel: its source and every header it may include, found without running a compiler."""

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from opjit import files
from opjit.errors import DeclarationError

_INCLUDE = re.compile(
    rb'#[ \t]*include(?:_next)?[ \t]*(["<])([^">\n]+)[">]'
)  # also in comments, which does no harm
_BY_MACRO = re.compile(rb"#[ \t]*include(?:_next)?[ \t]+()([A-Za-z_]\w*)")
_MACRO = re.compile(rb'(?:#[ \t]*define[ \t]+|-D\s*)(\w+)[ \t=]+(?:(["<])([^">\n]+)[">]|(\w+))')
# A header that appears where a source asks for one changes what is compiled. One pattern for both would take ten times as long.
_ASKED = re.compile(rb'__has_include(?:_next)?[ \t]*\([ \t]*(["<])([^">\n]+)[">]')
_UNREADABLE = "cannot be read"


class Scan:
    """Shared by the scans of one moment: each file is read once and searched for once, however many ops include it."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}  # sources that need not be on disk, by path
        self.read = cache(
            lambda path: parsed(
                self.texts[path] if path in self.texts else files.read_regular(path)
            )
        )
        self.file = cache(_file)
        self.closures: dict[
            tuple[object, ...], dict[str, str]
        ] = {}  # by the arguments of `closure`

    def find(
        self, kind: bytes, name: bytes, beside: str, include_path: tuple[str, ...]
    ) -> str | None:
        folders = ((beside,) if kind == b'"' else ()) + include_path
        return next(
            (path for folder in folders if (path := self.file(folder, name)) is not None), None
        )


def _file(folder: str, name: bytes) -> str | None:
    """Return the file that a compiler would include. Raises DeclarationError for a pipe or a device, which may have no end."""
    path = os.path.join(folder, os.fsdecode(name))
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # ValueError: a zero byte
        return None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DeclarationError(
            f"{path} is a pipe or a device, and a source includes it; put a file there"
        )
    return normalized(path) if stat.S_ISREG(mode) else None


def parsed(content: bytes) -> tuple[str, list[tuple[bytes, bytes]]]:
    """Return a text's SHA-256, and the opening quote and name of each header that it includes or asks for; a macro has no quote."""
    asked = _ASKED.findall(content) if b"__has_include" in content else []
    return hashlib.sha256(content).hexdigest(), _INCLUDE.findall(content) + _BY_MACRO.findall(
        content
    ) + asked


def closure(
    roots: Iterable[str],
    include_path: tuple[str, ...],
    scan: Scan | None = None,
    flags: Iterable[str] = (),
) -> dict[str, str]:
    """Return the SHA-256, by path, of the roots and of what any #include line leads to, `flags`' -D included; names found nowhere are
    the compiler's. Raises FileNotFoundError if a root is missing, DeclarationError for a pipe or a device; else see `unreadable`."""
    scan = scan or Scan()
    waiting = list(roots)
    flags = tuple(flags)
    known = tuple(waiting), include_path, flags
    digests = dict(scan.closures.get(known, ()))
    if digests:
        return digests
    by_macro: set[tuple[bytes, str]] = set()
    while waiting or (
        by_macro and (waiting := _named_by_macros(by_macro, digests, flags, include_path, scan))
    ):
        path = waiting.pop()
        if path in digests:
            continue
        try:
            digests[path], lines = scan.read(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            digests[path] = f"{_UNREADABLE} ({error.strerror}) {files.unique()}"
            continue
        beside = os.path.dirname(path)
        by_macro |= {(name, beside) for kind, name in lines if not kind}
        waiting += (
            found
            for kind, name in lines
            if kind and (found := scan.find(kind, name, beside, include_path)) is not None
        )
    scan.closures[known] = digests
    return dict(digests)


def _named_by_macros(
    asked: Collection[tuple[bytes, str]],
    digests: Mapping[str, str],
    flags: Iterable[str],
    include_path: tuple[str, ...],
    scan: Scan,
) -> list[str]:
    """Return the files beyond `digests` that included macros name; `asked` has the macros, each with the including file's folder."""
    read = (
        scan.texts.get(path) or files.read_regular(path)
        for path, digest in digests.items()
        if not digest.startswith(_UNREADABLE)
    )
    macros = [
        macro
        for text in ("\n".join(flags).encode("utf-8", "surrogateescape"), *read)
        for macro in _MACRO.findall(text)
    ]
    names = {name for name, _ in asked}
    while more := {other for name, _, _, other in macros if other and name in names} - names:
        names |= more
    found = {
        scan.find(kind, file, beside, include_path)
        for name, kind, file, _ in macros
        if kind and name in names
        for _, beside in asked
    }
    return [path for path in found if path is not None and path not in digests]


def unreadable(inputs: Mapping[str, str]) -> str | None:
    """Name the files that could not be read; None if there are none."""
    found = [
        f"{name} {digest.rpartition(' ')[0]}"
        for name, digest in inputs.items()
        if digest.startswith(_UNREADABLE)
    ]
    return ", ".join(found) or None


def normalized(path: str) -> str:
    """Return a path to the same file without ``..``, which after a symbolic link leads to the parent of the link's target."""
    normal = os.path.normpath(path)
    if ".." in path and not (os.path.exists(normal) and os.path.samefile(normal, path)):
        return os.path.realpath(path)
    return normal


def portable_name(path: str, folder: str, include: str, added: tuple[str, ...] = ()) -> str:
    """Return a file's name in a key, the same on every machine: by its place in the op's, opjit's or the author's include folders."""
    if path.startswith(folder + os.sep):
        return path[len(folder) + 1 :]
    if path.startswith(include + os.sep):
        return f"<opjit>/{path[len(include) + 1 :]}"
    for index, place in enumerate(added):
        if path.startswith(place + os.sep):
            return f"<include {index}>/{path[len(place) + 1 :]}"
    return os.path.relpath(path, folder)

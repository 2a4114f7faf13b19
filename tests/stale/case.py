"""A case: a folder of files and a request, before and after one edit. It is data, so it can be drawn, made smaller and printed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

HERE = "{here}"  # in texts and flags, stands for the absolute path of the folder


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Made:
    """A file that compilers or binutils make of C text.

    Attributes:
        how: "object", "archive", "thin" (an archive that names its object), "shared" (also "shared NAME", with a soname), or "header"
            (precompiled, for C; "header++" for C++).
        text: the C text.
    """

    how: str
    text: str


@dataclass(frozen=True)
class Dated:
    """A text with a date of its last change, in seconds since 1970."""

    text: str
    seconds: int


@dataclass(frozen=True)
class Program:
    """A shell script that may be run."""

    text: str


Content = str | Link | Made | Dated | Program


@dataclass(frozen=True)
class State:
    """The files and a request. The source is `a.c`; its function `value` has the answer."""

    files: Mapping[str, Content] = field(default_factory=dict)
    cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    generated: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    folder: str = "."  # the current folder of the request


@dataclass(frozen=True)
class Case:
    """One edit of a program.

    Attributes:
        name: words that say how the file is named and what the edit is.
        kind: which function of opjit builds it; a key of `ask.KINDS`.
        before, after: the program and its edit.
        together: whether one process makes all requests, or each has its own process.
        quiet: whether an edit of a file keeps its size and date where it can.
        root: the name of the folder of files.
        clock: whether the value has the time of the build, so that only a cached answer can be compared.
    """

    name: str
    kind: str
    before: State
    after: State
    together: bool = False
    quiet: bool = False
    root: str = "project"
    clock: bool = False


@cache
def _made(how: str, text: str) -> bytes:
    """The bytes of a file that tools make."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "f.c").write_text(text, encoding="utf-8")
        kind, _, soname = how.partition(" ")
        commands = {
            "object": ["gcc -c -fPIC f.c -o made"],
            "archive": ["gcc -c -fPIC f.c -o f.o", "ar rcsD made f.o"],
            "shared": [f"gcc -shared -fPIC f.c -o made -Wl,-soname,{soname}"],
            "header": ["gcc -x c-header -O2 -fPIC f.c -o made"],
            "header++": ["g++ -x c++-header -fPIC f.c -o made"],
        }[kind]
        for command in commands:
            subprocess.run(command.split(), cwd=folder, check=True)
        return (place / "made").read_bytes()


def _write(path: Path, content: Content, root: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Link):
        path.symlink_to(content.target.replace(HERE, str(root)))
    elif isinstance(content, Made) and content.how == "thin":
        member = path.with_suffix(".member.o")
        member.write_bytes(_made("object", content.text))
        path.unlink(missing_ok=True)
        subprocess.run(["ar", "rcsDT", path.name, member.name], cwd=path.parent, check=True)
    elif isinstance(content, Made):
        path.write_bytes(_made(content.how, content.text))
    else:
        text = content if isinstance(content, str) else content.text
        path.write_bytes(text.replace(HERE, str(root)).encode())
    if isinstance(content, Dated):
        os.utime(path, (content.seconds, content.seconds))
    if isinstance(content, Program):
        path.chmod(0o755)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def arrange(root: Path, state: State, previous: State | None, quiet: bool = False) -> None:
    """Turn the files of `previous` into those of `state`; only files that differ are touched."""
    old: Mapping[str, Content] = previous.files if previous is not None else {}
    for name in old.keys() - state.files.keys():
        _remove(root / name)
    for name, content in state.files.items():
        if old.get(name) == content:
            continue
        path = root / name
        before = path.lstat() if os.path.lexists(path) else None
        in_place = quiet and isinstance(content, str) and isinstance(old.get(name), str)
        if before is not None and not in_place:
            _remove(path)
        _write(path, content, root)
        if before is not None and in_place:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (root / state.folder).mkdir(parents=True, exist_ok=True)


def changed(state: State, **values: Any) -> State:
    """A state with fields replaced."""
    return replace(state, **values)


def edited(state: State, **changes: Any) -> State:
    """A state with fields replaced; a mapping is merged, and None removes its name."""
    merged: dict[str, Any] = {}
    for each in fields(State):
        value = getattr(state, each.name)
        change = changes.get(each.name, value)
        if isinstance(value, Mapping) and isinstance(change, Mapping):
            joined = {**value, **change}
            change = {name: content for name, content in joined.items() if content is not None}
        merged[each.name] = change
    return State(**merged)

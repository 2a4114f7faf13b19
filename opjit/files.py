"""Small file operations that a cache must get right: writes that appear whole, and folders that only their owner changes."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_own: list[tuple[Path, int]] = []  # temporary folders, and the processes that they go with


def unique() -> str:
    """A name that nobody else has."""
    return os.urandom(16).hex()


def stamp(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """What shows, without reading it, whether a file is the same; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def until_exit(prefix: str = "opjit-") -> Path:
    """A new temporary folder of this process's own, removed when it exits; one that ends with os._exit calls `remove_own` before.

    Raises:
        OSError: there is no room for it.
    """
    import tempfile  # not on the way of a hit

    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if not _own:
        atexit.register(remove_own)
    _own.append((folder, os.getpid()))
    return folder


def remove_own() -> None:
    """Remove this process's temporary folders; a forked child leaves its parent's alone."""
    for folder, owner in _own:
        if owner == os.getpid():
            remove_tree(folder)


def make_private(folder: Path) -> None:
    """Make a folder and its parents; what is made is the user's alone (0700)."""
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def let_read(folder: Path, top: Path) -> None:
    """Let everybody read a folder and its files, and enter those that it is in up to `top`.

    Raises:
        OSError: one is not this user's.
    """
    parents = (folder, *folder.parents)
    for each in (*folder.iterdir(), *parents[:parents.index(top) + 1]):
        status = each.stat()
        wanted = 0o055 if stat.S_ISDIR(status.st_mode) else 0o044
        if status.st_mode & wanted != wanted:
            each.chmod(stat.S_IMODE(status.st_mode) | wanted)


def distrusted(path: Path, like: Path | None = None) -> str | None:
    """None if only this user or root can have written `path` itself (its status, no symlink followed); else why not.

    Args:
        like: a file that decides what this process runs anyway: whoever can write that one may have written `path` too.
    """
    status = os.lstat(path)
    owners, writers = {os.geteuid(), 0}, 0
    if like is not None:
        known = os.stat(like)
        owners.add(known.st_uid)
        writers = known.st_mode & (0o022 if known.st_gid == status.st_gid else 0o002)
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return f"{path} is neither a file nor a folder"
    if status.st_uid not in owners:
        return f"{path} belongs to user {status.st_uid}, not to you or root"
    if status.st_mode & 0o022 & ~writers:
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w it"
    return None


def inside(folders: Iterable[str]) -> tuple[str, ...]:
    """What the real path of a file in one of the folders starts with."""
    return tuple(os.path.realpath(folder) + os.sep for folder in folders if folder)


def _open_own(name: str, flags: int) -> int:
    return os.open(name, flags, 0o644)  # whatever the umask would add


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with open(path, "xb", opener=_open_own) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_note(path: Path, text: str) -> None:
    """Write a file that is only a convenience: it appears whole or not at all, and no trouble is an error."""
    temporary = path.with_name(f".{path.name}.{unique()}")
    try:
        make_private(path.parent)
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace", opener=_open_own) as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def remove_tree(folder: Path) -> None:
    """Remove a folder that nobody needs; what cannot be removed now stays for the next sweep."""
    shutil.rmtree(folder, ignore_errors=True)

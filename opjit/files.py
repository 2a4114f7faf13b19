"""Small file operations that a cache must get right: writes that appear whole, and folders that only their owner changes."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opjit.errors import CacheWarning

_LINKS = 40  # symbolic links that Linux follows on one way
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


def digest(path: str) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def until_exit(prefix: str = "opjit-") -> Path:
    """A new temporary folder of this process's own, removed when it exits; one that ends with os._exit calls `remove_own` before.

    Raises:
        OSError: there is no room for it.
    """
    import tempfile  # not on the way of a hit

    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if not any(owner == os.getpid() for _, owner in _own):
        at_end(remove_own)
    _own.append((folder, os.getpid()))
    return folder


def is_own(path: Path) -> bool:
    """Whether it lies in one of this process's temporary folders."""
    return any(path.is_relative_to(folder) for folder, _ in _own)


def at_end(call: Callable[[], None]) -> None:
    """Call a function when this process ends, also where it is a forked worker of multiprocessing's: those do not get to atexit."""
    atexit.register(call)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, call, exitpriority=0)


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


def swappable(folder: Path) -> str | None:
    """None if nobody else can put another folder in this one's place; else who can, and what to do.

    That is so where each folder on the way, and each symbolic link, is this user's or root's, and others cannot write in it; in one
    with the sticky bit they may write, as they cannot move what is not theirs. The last folder must be closed to others altogether.
    Of a way that does not exist yet, what there is of it is looked at.
    """
    here, links, rest = "/", 0, [part for part in reversed(str(folder).split("/")) if part]
    try:
        top = status = os.lstat("/")
        while True:
            problem = _writer(here, status, not rest)
            if problem is not None or not rest:
                return problem and f"{problem[0]}, so others could put something else in the place of {folder}{problem[1]}"
            name = rest.pop()
            path = os.path.dirname(here) if name == ".." else f"{here.rstrip('/')}/{name}"
            found = os.lstat(path)
            if not stat.S_ISLNK(found.st_mode):
                here, status = path, found
                continue
            links += 1
            if found.st_uid not in (os.geteuid(), 0) or links > _LINKS:
                return f"{path} is a symbolic link of somebody else's, or one of too many on the way to {folder}"
            to = os.readlink(path)
            here, status = ("/", top) if to.startswith("/") else (here, status)
            rest += [part for part in reversed(to.split("/")) if part not in ("", ".")]
    except OSError:  # nothing there, or nothing that this user could read
        return None


def _writer(path: str, status: os.stat_result, last: bool) -> tuple[str, str] | None:
    """Why others could change what is in a folder on the way to another, and what to do; `last` is that one itself."""
    if status.st_uid not in (os.geteuid(), 0) and (last or not _unmapped(status.st_uid)):
        return f"{path} belongs to user {status.st_uid}, not to you or root", ""
    open_to = status.st_mode & 0o022
    if not stat.S_ISDIR(status.st_mode) or not open_to or (not last and status.st_mode & stat.S_ISVTX):
        return None
    if not last and open_to == 0o020 and _own_group(status.st_gid):
        return None
    return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})", f"; chmod go-w {path}"


def _own_group(group: int) -> bool:
    """Whether a group is this user's private one, as most systems make it: it has the user's name, and no other member."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _unmapped(user: int) -> bool:
    """Whether an id stands for all whom a container has no id for; in one that a user started, the host's root is among them."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        lengths = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError, IndexError):
        return False
    return user == overflow and sum(lengths) < 2**32 - 1


@contextmanager
def unread(path: Path) -> Iterator[None]:
    """Whatever the block reads of a file, it looks as if nobody had: its date says when it was used last."""
    try:
        before: os.stat_result | None = os.stat(path)
    except OSError:
        before = None
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


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


def remove_tree(path: Path) -> None:
    """Remove a folder, or a file, that nobody needs; what is busy now stays for the next sweep. One that may not be removed at all is
    told of."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
            os.rmdir(path)
        else:
            path.unlink()  # rmtree would wait for the other end of a pipe
    except PermissionError as error:
        warnings.warn(CacheWarning(f"what nobody needs any more cannot be removed: {error}"), stacklevel=2)
    except OSError:
        pass  # it is gone, as it should be, or stays

"""Small file operations that a cache must get right: atomic writes, and folders that only their owner can change."""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from opjit.errors import CacheWarning

_LINKS = 40  # symbolic links that Linux follows in one path
_own: list[tuple[Path, int]] = []  # temporary folders, and the ids of the processes that made them


def unique() -> str:
    """A random name."""
    return os.urandom(16).hex()


def stamp(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Changes with a file, and is cheaper than reading it; None if there is no file."""
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
    """Make a temporary folder that is removed when this process exits. A process that ends with os._exit calls `remove_own` first.

    Raises:
        OSError: no temporary folder can be made.
    """
    import tempfile  # late: no hit needs it

    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if not any(owner == os.getpid() for _, owner in _own):
        at_end(remove_own)
    _own.append((folder, os.getpid()))
    return folder


def is_own(path: Path) -> bool:
    """Whether a path lies in one of this process's temporary folders."""
    return any(path.is_relative_to(folder) for folder, _ in _own)


def at_end(call: Callable[[], None]) -> None:
    """Call a function when this process exits, also in a forked multiprocessing worker, which skips atexit."""
    atexit.register(call)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, call, exitpriority=0)


def remove_own() -> None:
    """Remove this process's temporary folders, but not those of a parent that forked it."""
    for folder, owner in _own:
        if owner == os.getpid():
            remove_tree(folder)


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents with mode 0700."""
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def let_read(folder: Path, top: Path) -> None:
    """Let all users read a folder and its files, and enter its parents up to `top`.

    Raises:
        OSError: one of them belongs to another user.
    """
    parents = (folder, *folder.parents)
    for each in (*folder.iterdir(), *parents[:parents.index(top) + 1]):
        status = each.stat()
        wanted = 0o055 if stat.S_ISDIR(status.st_mode) else 0o044
        if status.st_mode & wanted != wanted:
            each.chmod(stat.S_IMODE(status.st_mode) | wanted)


def distrusted(path: Path, trusted_as: Path | None = None) -> str | None:
    """None if only this user or root can have written `path` (its own status, no symlink followed); else the reason.

    Args:
        trusted_as: a file that this process runs anyway; its owner and its writers are trusted with `path` too.
    """
    status = os.lstat(path)
    owners, writers = {os.geteuid(), 0}, 0
    if trusted_as is not None:
        known = os.stat(trusted_as)
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
    """None if no other user can replace a folder by another one; else who can, and what to do.

    Each parent folder, and each symbolic link in the path, must belong to this user or root and not be writable by others. A parent
    with the sticky bit may be, as others cannot move foreign files there. The folder itself must not be writable by others at all.
    Of a path that does not exist yet, the existing parents are checked.
    """
    here, links, rest = "/", 0, [part for part in reversed(str(folder).split("/")) if part]
    try:
        top = status = os.lstat("/")
        while True:
            problem = _writer(here, status, not rest)
            if problem is not None or not rest:
                return problem and f"{problem[0]}, so others could replace {folder}{problem[1]}"
            name = rest.pop()
            path = os.path.dirname(here) if name == ".." else f"{here.rstrip('/')}/{name}"
            found = os.lstat(path)
            if not stat.S_ISLNK(found.st_mode):
                here, status = path, found
                continue
            links += 1
            if found.st_uid not in (os.geteuid(), 0) or links > _LINKS:
                return f"{path} is a symbolic link of another user, or one of too many in the path of {folder}"
            to = os.readlink(path)
            here, status = ("/", top) if to.startswith("/") else (here, status)
            rest += [part for part in reversed(to.split("/")) if part not in ("", ".")]
    except OSError:  # it does not exist, or this user cannot read it
        return None


def _writer(path: str, status: os.stat_result, last: bool) -> tuple[str, str] | None:
    """Why others could change the contents of one folder in a path, and what to do; `last` is the folder that the path leads to."""
    if status.st_uid not in (os.geteuid(), 0) and (last or not _unmapped(status.st_uid)):
        return f"{path} belongs to user {status.st_uid}, not to you or root", ""
    open_to = status.st_mode & 0o022
    if not stat.S_ISDIR(status.st_mode) or not open_to or (not last and status.st_mode & stat.S_ISVTX):
        return None
    if not last and open_to == 0o020 and _own_group(status.st_gid):
        return None
    return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})", f"; chmod go-w {path}"


def _own_group(group: int) -> bool:
    """Whether a group is the user's private group, as most systems make one: it has the user's name and no other member."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _unmapped(user: int) -> bool:
    """Whether an id stands for all users that a container does not map; the host's root is one of them in a user's own container."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        lengths = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError, IndexError):
        return False
    return user == overflow and sum(lengths) < 2**32 - 1


def inside(folders: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the real paths of all files in the folders."""
    return tuple(os.path.realpath(folder) + os.sep for folder in folders if folder)


def _open_own(name: str, flags: int) -> int:
    return os.open(name, flags, 0o644)  # without the umask, it could be writable by others


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and flush it to disk."""
    with open(path, "xb", opener=_open_own) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(staged: Path, place: Path, aside: Path, is_good: Callable[[Path], bool]) -> None:
    """Rename a complete folder to its place. A good one that is there already stays, and a bad one is moved aside.

    Raises:
        OSError: the folder cannot be renamed.
    """
    sync(staged)
    for _ in range(2):
        try:
            os.rename(staged, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            sync(place.parent)
            return
        if is_good(place):
            return
        with suppress(OSError):
            os.rename(place, aside)


def write_note(path: Path, text: str) -> None:
    """Write a file that is only a convenience: it appears whole or not at all, and errors are ignored."""
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
    """Remove a folder or a file. Busy files are left for the next sweep; a permission error gives a warning."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
            os.rmdir(path)
        else:
            path.unlink()  # rmtree would block on a pipe
    except PermissionError as error:
        warnings.warn(CacheWarning(f"a file that is no longer needed cannot be removed: {error}"), stacklevel=2)
    except OSError:
        pass  # already removed, or busy

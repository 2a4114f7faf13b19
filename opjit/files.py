"""Small file operations that a cache must get right: atomic writes, and folders that only their owner can change."""

import atexit
import errno
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from opjit.errors import EntryError, RecordError, warn_of_cache

_NOTE_BYTES = 16 << 20  # the largest note
_TICK = 0.02  # seconds during which a file system's clock may show the same time
_LINKS = 40  # symbolic links that Linux follows in one path
StrPath = str | os.PathLike[str]
_own: list[tuple[Path, int]] = []  # temporary folders, and the ids of the processes that made them


def random_name() -> str:
    return os.urandom(16).hex()


def stat_signature(path: StrPath) -> tuple[int, ...] | None:
    """Changes with a file, and is cheaper than reading it; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def sha256(content: bytes | str) -> str:
    """Return the SHA-256 of bytes, or of a text in UTF-8, in hexadecimal digits."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()


def digest(path: str) -> str:
    """Return the SHA-256 of a file that a user names."""
    return sha256(read_regular(path))


@contextmanager
def opened(path: Path, limit: int, trusted_as: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file of a cache.

    Raises EntryError if it is not a regular file, has more than `limit` bytes, or is `trust_problem`.
    """
    try:
        # Opening a pipe must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise EntryError(f"{path} is a symbolic link") from None
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        problem = trust_problem(path, trusted_as, status)
        if problem is None and not stat.S_ISREG(status.st_mode):
            problem = f"{path} is not a file"
        if problem is None and status.st_size > limit:
            problem = f"{path} has {status.st_size} bytes, more than {limit}"
        if problem is not None:
            raise EntryError(problem)
        yield file


def read(path: Path, limit: int, trusted_as: Path | None = None) -> bytes:
    """Read a file of a cache; see `opened`."""
    with opened(path, limit, trusted_as) as file:
        return file.read(limit)


def read_regular(path: StrPath, limit: int = 1 << 30) -> bytes:
    """Read a file that a user names, through links.

    Raises OSError if it cannot be read, has more than `limit` bytes, or is a folder, a pipe or a
    device.
    """
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    ) as file:  # opening a pipe must not block
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
        return file.read()


def inode_signature(descriptor: int) -> tuple[int, ...]:
    """Changes if a name gets another file, or a file another content."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def local_folder() -> Path:
    """Return this user's folder for locks, on a local filesystem: locks on shared ones are unreliable."""
    import tempfile

    return Path(tempfile.gettempdir()) / f"opjit-{os.geteuid()}"


def temporary_folder(prefix: str = "opjit-", parent: str | None = None) -> Path:
    """Make a temporary folder, in `parent` if it is given, that is removed when this process exits. A process that ends with os._exit calls
    `remove_own` first."""
    import tempfile  # late: no hit needs it

    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    if not any(owner == os.getpid() for _, owner in _own):
        at_end(remove_own)
    _own.append((folder, os.getpid()))
    return folder


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Open a temporary folder for a moment: in memory if no other place is writable."""
    import shutil  # late: no hit needs them
    import tempfile

    try:
        folder = tempfile.mkdtemp(prefix="opjit-")
    except OSError:
        folder = f"/dev/shm/opjit-{random_name()}"
        os.mkdir(folder, 0o700)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_own(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder, _ in _own)


def at_end(call: Callable[[], None]) -> None:
    """Call a function when this process exits.

    This also works in a forked multiprocessing worker, which skips atexit.
    """
    atexit.register(call)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, call, exitpriority=0)


def remove_own() -> None:
    """Remove this process's temporary folders, but not the folders of a parent that forked it."""
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
    """Let all users read a folder and its files, and enter its parents up to `top`. Raises OSError if another user owns one of them."""
    parents = (folder, *folder.parents)
    for each in (*folder.iterdir(), *parents[: parents.index(top) + 1]):
        status = each.stat()
        wanted = 0o055 if stat.S_ISDIR(status.st_mode) else 0o044
        if status.st_mode & wanted != wanted:
            each.chmod(stat.S_IMODE(status.st_mode) | wanted)


def trust_problem(
    path: Path, trusted_as: Path | None = None, status: os.stat_result | None = None
) -> str | None:
    """Return the reason why another user can have written a file or folder, or None if only this
    user or root can.

    Pass `status` if the file is open. `replacement_risk` must accept the directory of `path`. The owner
    and writers of `trusted_as`, a file that this process runs, are also trusted.
    """
    status = os.lstat(path) if status is None else status
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return f"{path} is neither a file nor a directory"
    problem = _writer(
        str(path), status, True, os.stat(trusted_as) if trusted_as is not None else None
    )
    return problem and "".join(problem)


def replacement_risk(path: Path, trusted_as: Path | None = None) -> str | None:
    """Return the reason why another user can write or replace a file or folder, and a remedy, or
    None if no other user can.

    Each folder and link on the way must belong to this user or root and not be writable by other
    users, unless its sticky bit is set, or other users cannot enter a folder above it. `trusted_as`: see
    `trust_problem`.
    """
    here = "/"
    closed: list[str] = []  # folders that only this user or root can enter
    links = 0
    rest = [part for part in reversed(str(path).split("/")) if part]
    try:
        known = os.stat(trusted_as) if trusted_as is not None else None
        top = status = os.lstat("/")
        while True:
            closed = [each for each in closed if here.startswith(each)]
            problem = _writer(here, status, not rest, known, bool(closed))
            if not status.st_mode & 0o011:
                closed.append(f"{here}/")
            if problem is not None or not rest:
                held = "what it holds" if here == str(path) else path
                return problem and f"{problem[0]}, so other users could replace {held}{problem[1]}"
            name = rest.pop()
            step = os.path.dirname(here) if name == ".." else f"{here.rstrip('/')}/{name}"
            found = os.lstat(step)
            if not stat.S_ISLNK(found.st_mode):
                here = step
                status = found
                continue
            links += 1
            if found.st_uid not in _owners(known) or links > _LINKS:
                return f"{step} is a symbolic link of another user, or one of too many in the path of {path}"
            to = os.readlink(step)
            here, status = ("/", top) if to.startswith("/") else (here, status)
            rest += [part for part in reversed(to.split("/")) if part not in ("", ".")]
    except OSError:  # it does not exist, or this user cannot read it
        return None


def require_closed(what: str, paths: Iterable[str], trusted_as: Path | None = None) -> None:
    """Raise RecordError if another user can write or replace one of the files from which `what`,
    which only a list names, is built. `trusted_as`: see `trust_problem`.
    """
    for path in paths:
        if problem := replacement_risk(Path(path), trusted_as):
            raise RecordError(
                f"refusing to build {what} from files that only the list names: {problem}"
            )


def _owners(known: os.stat_result | None) -> set[int]:
    return {os.geteuid(), 0} | ({known.st_uid} if known is not None else set())


def _writer(
    path: str,
    status: os.stat_result,
    last: bool,
    known: os.stat_result | None,
    closed: bool = False,
) -> tuple[str, str] | None:
    """Return the reason why another user can change a file or folder in a path, and a remedy.

    `last` is True for the end of the path, and `closed` if others cannot enter a folder above it.
    """
    if status.st_uid not in _owners(known) and (last or not _unmapped(status.st_uid)):
        return f"{path} belongs to user {status.st_uid}, not to you or root", ""
    open_to = status.st_mode & 0o022
    if known is not None:
        open_to &= ~(known.st_mode & (0o022 if known.st_gid == status.st_gid else 0o002))
    if (
        closed
        or not open_to
        or (not last and status.st_mode & stat.S_ISVTX)
        or (open_to == 0o020 and _own_group(path, status.st_gid))
    ):
        return None
    return (
        f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o})",
        f"; chmod go-w {path}",
    )


def _own_group(path: str, group: int) -> bool:
    """Return whether only this user has a group's permissions: the group has no other member.

    A directory service may not list its accounts. A group without any known member is the user's if it
    is the main group and has the user's name. If the file has an access control list, the mode covers
    all groups and users in the list, so the answer is False.
    """
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        found = grp.getgrgid(group)
    except KeyError:
        return False
    members = {*found.gr_mem, *_accounts(group)}
    if not members and group == user.pw_gid:
        members = {found.gr_name}
    return members == {user.pw_name} and not _has_list(path)


@cache
def _accounts(group: int) -> frozenset[str]:
    import pwd

    return frozenset(account.pw_name for account in pwd.getpwall() if account.pw_gid == group)


def _has_list(path: str) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError as error:
        return error.errno not in (errno.ENOTSUP, errno.ENOSYS)


def _unmapped(user: int) -> bool:
    """Return whether an id represents all users that a container does not map.

    In an unprivileged container, the host's root is one of these users.
    """
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        lengths = [
            int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()
        ]
    except (OSError, ValueError, IndexError):
        return False
    return user == overflow and sum(lengths) < 2**32 - 1


def _open_own(name: str, flags: int) -> int:
    return os.open(name, flags, 0o644)  # without the mode, other users might be able to write it


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


def write_whole(path: Path, content: bytes, synced: bool = True) -> None:
    """Write a file that other processes see only when it is complete and, if `synced`, flushed to
    disk.

    Raises OSError if it cannot be written.
    """
    staged = path.with_name(f".{random_name()}")
    try:
        if synced:
            write_synced(staged, content)
        else:
            with open(staged, "xb", opener=_open_own) as file:
                file.write(content)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    if synced:
        sync(path.parent)


def put_in_place(staged: Path, place: Path, aside: Path, is_good: Callable[[Path], bool]) -> None:
    """Rename a complete folder to its path.

    If a good folder is already there, it stays. A bad folder is moved out of the way.
    """
    sync(staged)
    for _ in range(2):
        if put_if_free(staged, place) or is_good(place):
            return
        with suppress(OSError):
            os.rename(place, aside)


def put_if_free(staged: Path, place: Path) -> bool:
    """Rename a complete folder to its path if that is free.

    Returns whether it did. Raises OSError if it cannot be renamed.
    """
    try:
        os.rename(staged, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    sync(place.parent)
    return True


def write_note(path: Path, text: str) -> None:
    """Write a file that is only a convenience: it appears whole or not at all, and errors are ignored."""
    with suppress(OSError):
        make_private(path.parent)
        write_whole(path, text.encode("utf-8", "backslashreplace"), synced=False)


def write_checked(path: Path | None, value: object) -> None:
    """Write a note in JSON with a digest, so that `read_checked` detects damage. Without a path, it does nothing."""
    if path is not None:
        text = json.dumps(value)
        write_note(path, f"{sha256(text)}\n{text}")


def read_checked(path: Path | None) -> object:
    """Return the value in a note, or None if the note does not exist, is damaged, or can have
    been written by another user.
    """
    if path is None:
        return None
    try:
        digest, _, text = read(path, _NOTE_BYTES).partition(b"\n")
        whole = sha256(text) == digest.decode()
        value: object = json.loads(text) if whole else None
    except (OSError, EntryError, ValueError, RecursionError):
        return None
    return value


def tick(folder: Path) -> int:
    """Return a time of the file system's clock, in nanoseconds, that later changes of files have, and no earlier one."""
    probe = folder / random_name()
    probe.touch()
    first = now = probe.stat().st_ctime_ns
    until = time.monotonic() + _TICK
    while now == first and time.monotonic() < until:
        probe.touch()
        now = probe.stat().st_ctime_ns
    probe.unlink()
    return now


def remove_tree(path: Path) -> None:
    """Remove a folder or a file. Busy files are left for the next sweep; a permission error gives a warning."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            import shutil  # late: 2 ms, which no hit needs

            shutil.rmtree(path, ignore_errors=True)
            os.rmdir(path)
        else:
            path.unlink()  # rmtree would block on a pipe
    except PermissionError as error:
        warn_of_cache(f"a file that is no longer needed cannot be removed: {error}")
    except OSError:
        pass  # already removed, or busy

"""The folders that opjit works in: the cache, and the temporary folder with the locks and the builds of processes without a cache.

What a filesystem can do is tried in a folder made for that, which is gone afterwards; nothing else is written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from opjit import files, lock
from opjit.doctor.finding import NOTE, OK, WARNING, Finding
from opjit.store import STAGING_AGE, Store, default_root

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LITTLE = 100 << 20  # bytes; a CUDA op's build takes ten million
_NETWORK = re.compile(r"nfs4?|lustre|gpfs|beegfs\w*|ceph|cifs|smb\w*|9p|afs|glusterfs|panfs|pvfs2|orangefs|wekafs|fuse\..*|virtiofs")
_MEMORY = ("tmpfs", "ramfs")
_CHANGE = "set OPJIT_CACHE to a folder of your own on another filesystem"
_TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("held")
"""


def cache() -> Iterator[Finding]:
    """The cache's folder: whether it can be written, read by nobody else, and loaded from."""
    root = default_root()
    place = existing(root)
    if not place.is_dir():
        yield Finding("cache", WARNING, f"{place} is no folder, so every process builds its ops anew", _CHANGE)
        return
    yield Finding("cache", OK, str(root) if place == root else f"{root}, which will be made in {place}")
    yield from _filesystem("cache", place)
    yield from _owners(root)
    yield from _room("cache", place)
    yield from _abilities("cache", place, "so a copy of each library in the temporary folder is loaded", _CHANGE)


def temporary() -> Iterator[Finding]:
    """The folder for locks, and for builds that cannot be kept."""
    place = existing(Path(tempfile.gettempdir()))
    change = "set TMPDIR to a folder on a local filesystem"
    yield Finding("temporary folder", OK, str(place))
    kind = filesystem(place)
    if _NETWORK.fullmatch(kind):
        yield Finding("temporary folder", WARNING, f"it is on {kind}, where locks may fail to exclude, so ops may be built twice", change)
    locks = lock.folder()
    if locks.exists() or locks.is_symlink():
        distrusted = files.distrusted(locks)
        if distrusted:
            yield Finding("temporary folder", WARNING, f"{distrusted.partition(';')[0]}, so builds do without locks",
                          f"remove {locks}, or set TMPDIR to a folder of your own")
    yield from _room("temporary folder", place)
    yield from _abilities("temporary folder", place, "so no library can be loaded from there", change)


def existing(path: Path) -> Path:
    """The path itself, else the nearest folder above it that is there."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def room_to_write(place: Path) -> bool:
    """Whether a small file can be written in a new folder in there."""
    try:
        with tempfile.TemporaryDirectory(prefix=".opjit-doctor-", dir=place) as folder:
            (Path(folder) / "file").write_bytes(bytes(1 << 16))
        return True
    except OSError:
        return False


def filesystem(path: Path, mounts: str | None = None) -> str:
    """The type of the filesystem that holds a path, such as ``"ext4"``.

    Args:
        mounts: text like that of /proc/mounts; None is that.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return "unknown"
    real, best, kind = os.path.realpath(path), "", "unknown"
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mounted = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[1])
        if len(mounted) >= len(best) and (real == mounted or real.startswith(mounted.rstrip("/") + "/")):
            best, kind = mounted, fields[2]  # of two at one place the later hides the earlier
    return kind


def _filesystem(about: str, place: Path) -> Iterator[Finding]:
    kind = filesystem(place)
    if _NETWORK.fullmatch(kind):
        yield Finding(about, NOTE, f"on {kind}, which other machines may share: that is safe, but look-ups cross the network, and two "
                                   "machines may build the same op at once",
                      "for many machines: OPJIT_CACHE on a local disk, and this folder in OPJIT_LAYERS")
    elif kind == "overlay":
        yield Finding(about, NOTE, "on a container's own layer: what is built goes with the container", "mount a volume there")
    elif kind in _MEMORY:
        yield Finding(about, NOTE, f"on {kind}, in memory: what is built goes with the next restart")
    else:
        yield Finding(about, OK, f"on {kind}")


def _owners(root: Path) -> Iterator[Finding]:
    """Nobody else may be able to write, or to swap, what is loaded."""
    store = Store(root)
    own = [folder for folder in (store.base, store.base / "staging", store.notes) if folder.exists()]
    problems = [problem for problem in (files.swappable(root), *map(files.distrusted, own)) if problem]
    for problem in problems:
        seen, _, todo = problem.partition("; ")
        yield Finding("cache", WARNING, f"{seen}, so it is not trusted and every process builds its ops anew",
                      todo or "set OPJIT_CACHE to a folder of your own")
    if not problems:
        yield Finding("cache", OK, "it is yours alone to write")


def _room(about: str, place: Path) -> Iterator[Finding]:
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    if free < _LITTLE:
        yield Finding(about, WARNING, f"{free / 1e6:.1f} MB are free on its filesystem", "make room: opjit cache clear removes every entry")
    elif room.f_files and not room.f_favail:
        yield Finding(about, WARNING, "its filesystem takes no more files, as it has no inodes left", "remove small files there")
    else:
        yield Finding(about, OK, f"{free / 1e9:.1f} GB are free on its filesystem")


def _abilities(about: str, place: Path, no_exec: str, change: str) -> Iterator[Finding]:
    """Try on the filesystem what a cache needs of one."""
    try:
        with tempfile.TemporaryDirectory(prefix=".opjit-doctor-", dir=place, ignore_cleanup_errors=True) as folder:
            findings = list(_try_each(about, Path(folder), no_exec, change))
    except OSError as error:
        findings = [_unwritable(about, place, error, change)]
    yield from findings or [Finding(about, OK, "files appear whole, folders are renamed, fsync, locks and libraries work there")]


def _unwritable(about: str, place: Path, error: OSError, change: str) -> Finding:
    if error.errno in _FULL:
        return Finding(about, WARNING, f"the filesystem of {place} is full or over quota ({error.strerror})",
                       f"make room there, or {change}")
    kept = "what is in it is used, and every process builds the rest anew" if about == "cache" else "builds have no locks"
    return Finding(about, WARNING, f"{place} cannot be written ({error.strerror}): {kept}", change)


def _try_each(about: str, folder: Path, no_exec: str, change: str) -> Iterator[Finding]:
    for attempt, lost in ((_write, "so nothing can be kept there"),
                          (_rename, "so entries cannot appear whole"),
                          (_own, "so entries there are not trusted"),
                          (_lock, "so an op may be built twice at once"),
                          (_execute, no_exec)):
        try:
            trouble = attempt(folder)
        except OSError as error:
            if error.errno in _FULL:
                yield _unwritable(about, folder.parent, error, change)
                return
            trouble = f"{attempt.__doc__} failed: {error.strerror}"
        if trouble:
            yield Finding(about, WARNING, f"{trouble}, {lost}", change)


def _write(folder: Path) -> str | None:
    """writing and syncing a new file"""
    files.write_synced(folder / "file", os.urandom(1 << 20))
    files.sync(folder)
    try:
        files.write_synced(folder / "file", b"")
    except FileExistsError:
        return None
    return "two processes can both make the same new file"


def _rename(folder: Path) -> str | None:
    """renaming a folder"""
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    os.rename(folder / "one", folder / "place")
    try:
        os.rename(folder / "two", folder / "place")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return "a folder can be renamed over another one"
    return None if (folder / "place" / "one").exists() else "a renamed folder does not keep its files"


def _own(folder: Path) -> str | None:
    """looking at a new file's owner"""
    files.write_synced(folder / "own", b"")
    problem = files.distrusted(folder / "own") or files.distrusted(folder)
    return f"of what you write there, {problem.partition(';')[0]}" if problem else None


def _lock(folder: Path) -> str | None:
    """locking a file against another process"""
    path = folder / "lock"
    with open(path, "x") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first = _seen_by_another(path)
        fcntl.flock(file, fcntl.LOCK_UN)
        second = _seen_by_another(path)
    return None if (first, second) == ("held", "free") else f"a lock is {first} while it is held and {second} when it is freed"


def _seen_by_another(path: Path) -> str:
    try:
        done = subprocess.run([sys.executable, "-ISc", _TRY_LOCK, str(path)], capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "waited for without end"
    return done.stdout.strip() or (done.stderr.strip().splitlines() or ["unknown"])[-1]


def _execute(folder: Path) -> str | None:
    """mapping a file as code"""
    path = folder / "code"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "rb") as file:
        try:
            mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            noexec = os.statvfs(folder).f_flag & os.ST_NOEXEC
            return "it is mounted noexec" if noexec else "the system forbids to run code from there"
    return None


def leftovers() -> Iterator[Finding]:
    """Staging folders that killed builders left, and locks: who holds them."""
    staging = Store(default_root()).base / "staging"
    ages = []
    with suppress(OSError), os.scandir(staging) as found:
        for each in found:
            with suppress(OSError):
                ages.append(time.time() - each.stat(follow_symlinks=False).st_mtime)
    old = [age for age in ages if age > STAGING_AGE]
    if old:
        yield Finding("builds", NOTE, f"{len(old)} folder{'s' * (len(old) != 1)} of builds that were killed in {staging}, the oldest "
                                      f"{max(old) / 86400:.0f} days old: the next build removes them")
    if len(ages) > len(old):
        yield Finding("builds", OK, f"{len(ages) - len(old)} under way, or killed within a day, in {staging}")
    held = [finding for path in sorted(lock.folder().glob("*.lock")) if (finding := _holder(path))]
    yield from held
    if not ages and not held:
        yield Finding("builds", OK, "none under way, none left behind")


def _holder(path: Path) -> Finding | None:
    """Who holds a lock; None where it is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pass
    except OSError:
        return None
    finally:
        os.close(descriptor)
    known = lock.holder(path.with_suffix(".json"))
    if known is None:
        return Finding("builds", NOTE, f"the lock {path} is held, and nothing says by whom")
    whose = f"has held the lock {path} for {time.time() - known.since:.0f} s"
    if process(known.pid)[0] in ("T", "t"):
        return Finding("builds", WARNING, f"process {known.pid}, which {whose}, is stopped; others may wait",
                       f"kill -CONT {known.pid}, or kill -KILL {known.pid}")
    return Finding("builds", OK, f"process {known.pid} {whose}")


def process(pid: int) -> tuple[str, int]:
    """A process's state, as ps shows it, and its session; an empty string and 0 where there is none."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[3])
    return "", 0

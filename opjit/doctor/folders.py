"""Checks of the cache, of the temporary folder, and of unfinished builds.

A filesystem is tried out in a temporary folder there; nothing else is written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from opjit import files
from opjit.doctor.report import NOTE, OK, PROBLEM, WARNING, Observation
from opjit.store import lock
from opjit.store.store import STAGING_AGE, Store, default_root

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOW_SPACE = 100 << 20  # bytes; building a CUDA op takes about ten million
_NETWORK = re.compile(r"nfs4?|lustre|gpfs|beegfs\w*|ceph|cifs|smb\w*|9p|afs|glusterfs|panfs|pvfs2|orangefs|wekafs|fuse\..*|virtiofs")
_USE_ANOTHER = "set OPJIT_CACHE to a folder of your own on another filesystem"


def cache() -> Iterator[Observation]:
    """Check the cache's folder: its filesystem, its permissions, its free space, and what works there."""
    root = default_root()
    place = nearest_existing(root)
    if not place.is_dir():
        yield Observation("cache", WARNING, f"{place} is not a folder, so every process builds its ops again", _USE_ANOTHER)
        return
    yield Observation("cache", OK, str(root) if place == root else f"{root}, to be created in {place}")
    yield _filesystem_type(place)
    yield from _permissions(root)
    yield from _free_space("cache", place)
    yield from _operations("cache", place, _USE_ANOTHER)


def temporary() -> Iterator[Observation]:
    """Check the folder for locks, and for builds that cannot be cached."""
    place = nearest_existing(Path(tempfile.gettempdir()))
    advice = "set TMPDIR to a folder on a local filesystem"
    yield Observation("temporary folder", OK, str(place))
    kind = filesystem(place)
    if _NETWORK.fullmatch(kind):
        yield Observation("temporary folder", WARNING, f"it is on {kind}, where locks may fail, so ops may be built twice", advice)
    locks = lock.folder()
    if locks.exists() or locks.is_symlink():
        distrusted = files.distrusted(locks)
        if distrusted:
            yield Observation("temporary folder", WARNING, f"{distrusted.partition(';')[0]}, so builds run without locks",
                              f"remove {locks}, or set TMPDIR to a folder of your own")
    yield from _free_space("temporary folder", place)
    yield from _operations("temporary folder", place, advice)


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def filesystem(path: Path) -> str:
    """Return the type of a path's filesystem, such as ``"ext4"``, or ``"unknown"``."""
    try:
        done = subprocess.run(["df", "--output=fstype", "--", path], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split()[-1]


def _filesystem_type(place: Path) -> Observation:
    kind = filesystem(place)
    if _NETWORK.fullmatch(kind):
        return Observation("cache", NOTE,
                           f"on {kind}, which other machines may share: this is safe, but look-ups cross the network, and two machines "
                           "may build the same op at once",
                           "with many machines, put OPJIT_CACHE on a local disk and this folder in OPJIT_LAYERS")
    if kind == "overlay":
        return Observation("cache", NOTE, "on a container's own layer: built ops are lost with the container", "mount a volume there")
    if kind in ("tmpfs", "ramfs"):
        return Observation("cache", NOTE, f"on {kind}, in memory: built ops are lost at the next restart")
    return Observation("cache", OK, f"on {kind}")


def _permissions(root: Path) -> Iterator[Observation]:
    """Check whether other users can write or replace what is loaded."""
    store = Store(root)
    own = [folder for folder in (store.base, store.base / "staging", store.base / "toolchain") if folder.exists()]
    problems = [problem for problem in (files.swappable(root), *map(files.distrusted, own)) if problem]
    for problem in problems:
        seen, _, todo = problem.partition("; ")
        yield Observation("cache", WARNING, f"{seen}, so opjit does not trust it, and every process builds its ops again",
                          todo or "set OPJIT_CACHE to a folder of your own")
    if not problems:
        yield Observation("cache", OK, "only you can write to it")


def _free_space(about: str, place: Path) -> Iterator[Observation]:
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    if free < _LOW_SPACE:
        yield Observation(about, WARNING, f"{free / 1e6:.1f} MB are free on its filesystem",
                          "free some space: opjit cache clear removes every entry")
    else:
        yield Observation(about, OK, f"{free / 1e9:.1f} GB are free on its filesystem")


def _operations(about: str, place: Path, advice: str) -> Iterator[Observation]:
    """Try the operations that opjit needs."""
    try:
        with tempfile.TemporaryDirectory(prefix=".opjit-doctor-", dir=place, ignore_cleanup_errors=True) as folder:
            observations = list(_try_operations(about, Path(folder), advice))
    except OSError as error:
        observations = [_unwritable(about, place, error, advice)]
    yield from observations or [Observation(about, OK, "renaming, syncing, locking and loading libraries work there")]


def _unwritable(about: str, place: Path, error: OSError, advice: str) -> Observation:
    if error.errno in _FULL:
        return Observation(about, WARNING, f"the filesystem of {place} is full or over quota ({error.strerror})",
                           f"free some space there, or {advice}")
    effect = "every process builds the ops that are missing there" if about == "cache" else "builds run without locks"
    return Observation(about, WARNING, f"{place} cannot be written ({error.strerror}), so {effect}", advice)


def _try_operations(about: str, folder: Path, advice: str) -> Iterator[Observation]:
    for attempt, name, effect in _ATTEMPTS:
        try:
            trouble = attempt(folder)
        except OSError as error:
            if error.errno in _FULL:
                yield _unwritable(about, folder.parent, error, advice)
                return
            trouble = f"{name} failed: {error.strerror}"
        if trouble:
            state = PROBLEM if attempt is _execute and about == "cache" else WARNING
            yield Observation(about, state, f"{trouble}, {effect}", advice)


def _write(folder: Path) -> None:
    files.write_synced(folder / "file", os.urandom(1 << 20))
    files.sync(folder)


def _rename(folder: Path) -> str | None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    os.rename(folder / "one", folder / "place")
    try:
        os.rename(folder / "two", folder / "place")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return None
    return "renaming a folder replaces one that is not empty"


def _ownership(folder: Path) -> str | None:
    files.write_synced(folder / "own", b"")
    problem = files.distrusted(folder / "own") or files.distrusted(folder)
    return f"new files there are not safe: {problem.partition(';')[0]}" if problem else None


def _lock(folder: Path) -> str | None:
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    with open(folder / "lock", "x") as one, open(folder / "lock") as other:  # a lock belongs to an open file, so one process can try two
        fcntl.flock(one, exclusive)
        try:
            fcntl.flock(other, exclusive)
            return "a held lock can be taken again"
        except BlockingIOError:
            fcntl.flock(one, fcntl.LOCK_UN)
        try:
            fcntl.flock(other, exclusive)
        except BlockingIOError:
            return "a released lock stays held"
    return None


def _execute(folder: Path) -> str | None:
    path = folder / "code"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "rb") as file:
        try:
            mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            noexec = os.statvfs(folder).f_flag & os.ST_NOEXEC
            return "it is mounted noexec" if noexec else "the system forbids running code from there"
    return None


# What opjit does in a cache or a temporary folder: a trial that returns what is wrong, its name, and what follows where it fails.
_ATTEMPTS: tuple[tuple[Callable[[Path], str | None], str, str], ...] = (
    (_write, "writing and syncing a new file", "so nothing can be stored there"),
    (_rename, "renaming a folder", "so an entry cannot appear in one step"),
    (_ownership, "checking a new file's owner", "so opjit does not trust entries there"),
    (_lock, "locking a file", "so two processes may build the same op at once"),
    (_execute, "mapping a file as code", "so no library can be loaded from there"))


def builds() -> Iterator[Observation]:
    """Count the staging folders of unfinished builds."""
    staging = Store(default_root()).base / "staging"
    ages = []
    for each in staging.glob("*"):
        with suppress(OSError):
            ages.append(time.time() - each.lstat().st_mtime)
    old = sum(age > STAGING_AGE for age in ages)
    yield Observation("builds", OK, f"{len(ages) - old} under way or killed less than a day ago, {old} older, which the next build "
                                    f"removes, in {staging}" if ages else "none under way, none left behind")

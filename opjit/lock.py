"""One builder per key on a machine. The lock saves duplicate work and carries no correctness: without it, two builders
publish the same bytes and one of them wins. The kernel frees it when its holder dies."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout, UnixFileLock

from opjit import files
from opjit.errors import CacheWarning

POLL = 0.05  # seconds between a waiter's looks


def folder() -> Path:
    """This user's folder for locks, on a filesystem of this machine: locks on shared ones are not to be relied on."""
    return Path(tempfile.gettempdir()) / f"opjit-{os.geteuid()}"


@contextmanager
def held(key: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a key, or go on without it where locks do not work.

    Args:
        waiting: told once whom this process waits for.
    """
    release = _acquire(key, waiting)
    assert release is not None
    try:
        yield
    finally:
        release()


def attempt(key: str) -> Callable[[], None] | None:
    """Hold the lock of a key until the result is called; None where somebody has it. Where locks do not work, nobody has."""
    return _acquire(key, None)


def _acquire(key: str, waiting: Callable[[str], None] | None) -> Callable[[], None] | None:
    """Take a lock; without `waiting`, do not wait for it."""
    try:
        place = folder()
        files.make_private(place)
        problem = files.distrusted(place)
        if problem:
            raise OSError(problem)
        lock = UnixFileLock(place / f"{key}.lock", mode=0o600, poll_interval=POLL, fallback_to_soft=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if waiting is None:
                return None
            waiting(_holder(place, key))
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        warnings.warn(CacheWarning(f"building without a lock, so another process may build the same op: {error}"), stacklevel=2)
        return lambda: None
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    files.write_note(place / f"{key}.json", json.dumps(holder))

    def release() -> None:
        with suppress(OSError):
            (place / f"{key}.json").unlink()
        lock.release()

    return release


def _holder(place: Path, key: str) -> str:
    """Who holds the lock, in words."""
    try:
        holder = json.loads((place / f"{key}.json").read_text())
        return f"process {int(holder['pid'])}, which has been building it for {time.time() - float(holder['since']):.0f} s"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process, which is building it"

"""One builder per key and machine. The lock only saves work: without it, two builders publish the same bytes, and one wins.

    <tmp>/opjit-<uid>/<key>.lock    filelock's, over flock(2): the kernel releases it when its holder dies
    <tmp>/opjit-<uid>/<key>.json    the holder's note: process, start time and step, rewritten every second as a heartbeat

A separate thread acquires and releases the lock and writes the note, so a lock service that hangs cannot block the build. A waiter
measures the heartbeat by its own clock. If the note does not change for HEARTBEAT_TIMEOUT, the waiter takes the holder for stopped and
builds without the lock. Lock files are never removed: two waiters could then lock different files.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import Timeout, UnixFileLock

from opjit import files, processes, progress
from opjit.errors import CacheWarning, EntryError

processes.watch_forks()  # again, as filelock has registered fork hooks of its own

POLL = 0.05  # seconds between a waiter's checks
HEARTBEAT = 1.0  # seconds between a holder's notes
HEARTBEAT_TIMEOUT = 15.0  # seconds without a new note until a waiter builds without the lock
STEP_TIMEOUT = 3600.0  # seconds in one step until a holder stops its heartbeat
_NOTE_BYTES = 1 << 16  # the largest note of a holder
_RELEASE_TIMEOUT = 5.0  # seconds that a holder waits for its thread to release the lock


class Holder(NamedTuple):
    """A holder's note: its process, when it acquired the lock (seconds since 1970), and its step."""

    pid: int
    since: float
    step: str

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"process {self.pid}, which has been building it since {since} ({self.step})"


def folder() -> Path:
    """Return this user's folder for locks, on a local filesystem: locks on shared ones are unreliable."""
    return Path(tempfile.gettempdir()) / f"opjit-{os.geteuid()}"


@contextmanager
def held(key: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a key during the block. If locks do not work, or the holder hangs, warn and go on without it.

    The block reports its steps with `progress.step`; waiters see them.

    Args:
        on_wait: called with the holder's process, start time and step, as text, whenever one of them changes.

    Example:
        >>> with lock.held(key, print):
        ...     build()
        process 4711, which has been building it since 10:02:31 (compiling)
    """
    thread = _LockThread(key)
    try:
        thread.acquire(on_wait)
        with progress.on_step(thread.step):
            yield
    finally:
        thread.release()


class _LockThread(threading.Thread):
    """Acquires a lock, sends heartbeats, and releases the lock on request."""

    def __init__(self, key: str) -> None:
        super().__init__(name="opjit-lock", daemon=True)
        self.key = key
        self._owner = os.getpid()
        self._settled = threading.Event()  # acquired or failed
        self._trouble: str | None = None  # why it failed
        self._steps: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._note: Path | None = None
        self._acquired = self._released = False

    # --- called by the building thread

    def acquire(self, on_wait: Callable[[str], None]) -> None:
        """Return when the lock is held. If it cannot be, warn and return."""
        try:
            self.start()
        except RuntimeError as error:  # the system refuses another thread
            self._fail(error)
        trouble = self._wait(on_wait)
        if trouble is not None:
            warnings.warn(CacheWarning(f"building without a lock, so another process may build the same: {trouble}"), stacklevel=4)

    def _wait(self, on_wait: Callable[[str], None]) -> str | None:
        reported, seen, silent, last = "", None, 0.0, time.monotonic()
        while not self._settled.wait(POLL):
            sign = files.stamp(self._note) if self._note is not None else None
            now = time.monotonic()
            # At most a second per check: this process may have been stopped itself.
            silent, seen, last = (silent + min(now - last, 1.0) if sign == seen else 0.0), sign, now
            text = str((holder(self._note) if self._note is not None else None) or "another process, which is building it")
            if text != reported and not self._acquired:  # once acquired, the note is this process's own
                reported = text
                on_wait(text)
            if silent > HEARTBEAT_TIMEOUT:
                return f"waited for {text}; it has given no sign of life for {silent:.0f} s"
        return self._trouble

    def step(self, name: str) -> None:
        if os.getpid() == self._owner:
            self._steps.put(name)

    def release(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked child; the lock belongs to its parent
        self._released = True
        self._steps.put(None)
        if self._settled.is_set() and self._trouble is None:
            self.join(_RELEASE_TIMEOUT)

    def _fail(self, error: Exception) -> None:
        self._trouble = str(error)
        self._settled.set()

    # --- run by this thread

    def run(self) -> None:
        try:
            place = folder()
            files.make_private(place)
            problem = files.distrusted(place)
            if problem:
                raise OSError(problem)
            self._note = place / f"{self.key}.json"
            _probe(place)
            lock = UnixFileLock(place / f"{self.key}.lock", mode=0o600, fallback_to_soft=False, thread_local=False)
            if not self._acquire(lock):
                return
        except Exception as error:  # the build must not wait for any failure here
            self._fail(error)
            return
        try:
            self._hold(self._note)
        finally:
            with suppress(OSError):  # closing the file frees the lock all the same
                lock.release(force=True)

    def _acquire(self, lock: UnixFileLock) -> bool:
        while not self._released:
            try:
                lock.acquire(timeout=0)
                return True
            except Timeout:
                time.sleep(POLL)
        return False

    def _hold(self, note: Path) -> None:
        fields = {"pid": os.getpid(), "since": time.time()}
        step: str | None = "compiling"
        began = time.monotonic()
        self._acquired = True
        while step is not None:
            if time.monotonic() - began < STEP_TIMEOUT:
                files.write_note(note, json.dumps({**fields, "step": step}))
            self._settled.set()
            with suppress(queue.Empty):
                step = self._steps.get(timeout=HEARTBEAT)
                began = time.monotonic()
        with suppress(OSError):
            note.unlink()


def _probe(place: Path) -> None:
    """Call flock once. If it hangs, it hangs this thread; inside filelock it would hang every fork of the process."""
    descriptor = os.open(place / "probe", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def holder(note: Path) -> Holder | None:
    """Read a holder's note; None if it is missing or damaged."""
    try:
        fields = json.loads(files.read(note, _NOTE_BYTES))
        time.localtime(float(fields["since"]))  # raises if it is not a date
        return Holder(int(fields["pid"]), float(fields["since"]), str(fields["step"])[:40])
    except (OSError, EntryError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None

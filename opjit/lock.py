"""One builder per key on a machine. The lock saves duplicate work and carries no correctness: without it, two builders
publish the same bytes and one of them wins.

    <tmp>/opjit-<uid>/<key>.lock    filelock's, over flock(2): the kernel frees it when its holder dies
    <tmp>/opjit-<uid>/<key>.json    the holder's note: who, since when, at which step; written anew every second

A thread of its own takes the lock, keeps the note and frees the lock, so that nothing which blocks there (a lock service that
is gone) can block the build. A waiter looks at the note, by its own clock: if that has not changed for SILENCE, the holder is
stopped, and the waiter builds without the lock. Files of locks stay: who removes one splits those who wait for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import Timeout, UnixFileLock

from opjit import files, progress, registration
from opjit.errors import CacheWarning

registration.watch()  # filelock, too, has something to do before a fork, and a part of torch's builder waits for it to be done

POLL = 0.05  # seconds between a waiter's looks
BEAT = 1.0  # seconds between a holder's signs of life
SILENCE = 15.0  # seconds without one, after which a waiter goes on alone
LONGEST = 3600.0  # seconds in one step, after which a holder gives no more signs
_LEAVING = 5.0  # seconds that a holder waits for its lock to be freed


class Holder(NamedTuple):
    """What the note of a lock's holder says: its process, since when it holds the lock (seconds since 1970), and its step."""

    pid: int
    since: float
    step: str


def folder() -> Path:
    """This user's folder for locks, on a filesystem of this machine: locks on shared ones are not to be relied on."""
    return Path(tempfile.gettempdir()) / f"opjit-{os.geteuid()}"


@contextmanager
def held(key: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a key, or go on without it, with one CacheWarning, where locks do not work or its holder does not.

    What is done under it tells its steps to `progress.step`; those who wait see them.

    Args:
        waiting: told whom this process waits for, since when and at which step; again when that changes.

    Example:
        >>> with lock.held(key, print):
        ...     build()
        process 4711, which has been building it since 10:02:31 (compiling)
    """
    keeper = _Keeper(key)
    try:
        keeper.begin()
        keeper.wait(waiting)
        with progress.stepping(keeper.step):
            yield
    finally:
        keeper.leave()


def attempt(key: str) -> Callable[[], None] | None:
    """Hold the lock of a key until the result is called; None where somebody has it. Where locks do not work, nobody has."""
    keeper = _Keeper(key, patient=False)
    keeper.begin()
    keeper.wait(lambda holder: None)
    return None if keeper.busy else keeper.leave


class _Keeper(threading.Thread):
    """Takes a lock, holds it until it is told to leave, and shows meanwhile that its process runs.

    Attributes:
        busy: somebody else has the lock, and this keeper is not `patient`.
    """

    def __init__(self, key: str, patient: bool = True) -> None:
        super().__init__(name="opjit-lock", daemon=True)
        self.key = key
        self.busy = False
        self._patient = patient
        self._owner = os.getpid()
        self._settled = threading.Event()  # the lock is held, or cannot be
        self._trouble: str | None = None  # why it cannot be
        self._steps: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._note: Path | None = None
        self._taken = self._left = False

    # --- for the thread that builds

    def begin(self) -> None:
        try:
            self.start()
        except RuntimeError as error:  # the process may have no more threads
            self._fail(error)

    def wait(self, waiting: Callable[[str], None]) -> None:
        """Until the lock is held, or there is a reason to go on without it, which is warned of."""
        trouble = self._wait(waiting)
        if trouble is not None:
            warnings.warn(CacheWarning(f"building without a lock, so another process may build the same: {trouble}"), stacklevel=4)

    def _wait(self, waiting: Callable[[str], None]) -> str | None:
        told, seen, silent, last = "", None, 0.0, time.monotonic()
        while not self._settled.wait(POLL):
            sign = files.stamp(self._note) if self._note is not None else None
            now = time.monotonic()
            # a second at most: while this process was stopped itself, it did not listen
            silent, seen, last = (silent + min(now - last, 1.0) if sign == seen else 0.0), sign, now
            words = _words(holder(self._note) if self._note is not None else None)
            if words != told and not self._taken:  # else the note may be this process's own by now
                told = words
                waiting(words)
            if silent > SILENCE:
                return f"waited for {words}, and it has given no sign of life for {silent:.0f} s"
        return self._trouble

    def step(self, name: str) -> None:
        if os.getpid() == self._owner:
            self._steps.put(name)

    def leave(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked child: the lock is its parent's
        self._left = True
        self._steps.put(None)
        if self._settled.is_set() and self._trouble is None:
            self.join(_LEAVING)

    def _fail(self, error: Exception) -> None:
        self._trouble = str(error)
        self._settled.set()

    # --- the keeper's own

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
            if not self._take(lock):
                return
        except Exception as error:  # whatever it is, the build must not wait for it
            self._fail(error)
            return
        try:
            self._keep(self._note)
        finally:
            lock.release(force=True)

    def _take(self, lock: UnixFileLock) -> bool:
        while not self._left:
            try:
                lock.acquire(timeout=0)
                return True
            except Timeout:
                self.busy = not self._patient
                if self.busy:
                    self._settled.set()
                    return False
                time.sleep(POLL)
        return False

    def _keep(self, note: Path) -> None:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        step: str | None = "compiling"
        self._taken = True
        files.write_note(note, json.dumps({**who, "step": step}))
        self._settled.set()
        began = time.monotonic()
        while step is not None:
            with suppress(queue.Empty):
                step = self._steps.get(timeout=BEAT)
                while step is not None and not self._steps.empty():
                    step = self._steps.get()
                began = time.monotonic()
            if step is not None and time.monotonic() - began < LONGEST:
                files.write_note(note, json.dumps({**who, "step": step}))
        with suppress(OSError):
            note.unlink()


def _probe(place: Path) -> None:
    """Return if flock answers at once, as it should when it is not to wait; the lock of this file is nobody's business.

    Where it does not answer, it is this thread that hangs here. In filelock's code it would hang every fork of the process.
    """
    descriptor = os.open(place / "probe", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def holder(note: Path) -> Holder | None:
    """What a holder's note says; None where there is none that can be read."""
    try:
        said = json.loads(note.read_text())
        time.localtime(float(said["since"]))  # or it is no date
        return Holder(int(said["pid"]), float(said["since"]), str(said["step"])[:40])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _words(known: Holder | None) -> str:
    """Who holds the lock, in words."""
    if known is None:
        return "another process, which is building it"
    since = time.strftime("%H:%M:%S", time.localtime(known.since))
    return f"process {known.pid}, which has been building it since {since} ({known.step})"

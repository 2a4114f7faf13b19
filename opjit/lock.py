"""One builder per key and machine. The lock only saves work: without it, two builders publish the same bytes, and one wins.

    <tmp>/opjit-<uid>/<key>.lock    filelock's, over flock(2): the kernel releases it when its holder dies
    <tmp>/opjit-<uid>/<key>.note    who holds it, since when and for which step, rewritten every second as a heartbeat

A separate thread acquires and releases the lock and writes the note, so a lock service that hangs
cannot block the build. If the note does not change for HEARTBEAT_TIMEOUT, a waiter assumes that the
holder hangs, and builds without the lock. Lock files are never removed, because two waiters could
then lock different files.
"""

import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from opjit import files, processes, progress
from opjit.errors import EntryError, warn_of_cache

processes.watch_forks()  # again, because filelock has registered fork hooks

POLL = 0.05  # seconds between a waiter's checks
HEARTBEAT = 1.0  # seconds between a holder's notes
HEARTBEAT_TIMEOUT = 15.0  # seconds without a new note until a waiter builds without the lock
_NOTE_BYTES = 200
_RELEASE_TIMEOUT = 5.0  # seconds that a holder waits for its thread to release the lock


@contextmanager
def held(
    key: str, on_wait: Callable[[str], None], warn: Callable[[str], None] = warn_of_cache
) -> Iterator[None]:
    """Hold the lock of a key during the block, or warn and go on. `on_wait` hears who holds it, since when and for which step."""
    thread = _LockThread(key)
    try:
        trouble = thread.acquire(on_wait)
        if trouble is not None:
            warn(f"building without a lock, so another process may build the same: {trouble}")
        with progress.on(progress.STEP, thread.step):
            yield
    finally:
        thread.release()


def holder(note: Path) -> str:
    """Say who holds a lock, as far as its note can be read."""
    with suppress(OSError, EntryError, UnicodeDecodeError):
        text = files.read(note, _NOTE_BYTES).decode()
        if text and text.isprintable():
            return text
    return "another process, which is building it"


class _LockThread(threading.Thread):
    """Acquires a lock, sends heartbeats, and releases the lock on request."""

    def __init__(self, key: str) -> None:
        super().__init__(name="opjit-lock", daemon=True)
        self._key = key
        self._note = Path(os.devnull)  # until the thread has found a temporary folder
        self._owner = os.getpid()
        self._settled = threading.Event()  # acquired or failed
        self._trouble: str | None = None  # why it failed
        self._steps: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._acquired = self._released = False

    # --- called by the building thread

    def acquire(self, on_wait: Callable[[str], None]) -> str | None:
        """Wait for the lock. Returns the reason if the build has to do without."""
        try:
            self.start()
        except RuntimeError as error:  # the system refuses another thread
            self._fail(error)
        reported = ""
        seen = None
        since = time.monotonic()
        while not self._settled.wait(POLL):
            stamp = files.stat_signature(self._note)
            now = time.monotonic()
            if stamp != seen:
                seen = stamp
                since = now
            text = holder(self._note)
            if text != reported and not self._acquired:  # then this process wrote the note
                reported = text
                on_wait(text)
            if now - since > HEARTBEAT_TIMEOUT:
                return f"waited for {text}; it has not shown any progress for {now - since:.0f} s"
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
            with processes.importing:  # a child of a fork would find tempfile's lock taken
                place = files.local_folder()
            files.make_private(place)
            problem = files.trust_problem(place)
            if problem:
                raise OSError(problem)
            self._note = place / f"{self._key}.note"
            # If flock hangs, it hangs this thread; inside filelock it would hang every fork of the process.
            descriptor = os.open(
                place / "probe", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            finally:
                os.close(descriptor)
            lock = FileLock(place / f"{self._key}.lock", mode=0o600, fallback_to_soft=False)
            with (
                suppress(Timeout),
                lock.acquire(poll_interval=POLL, cancel_check=lambda: self._released),
            ):
                self._acquired = True
                self._hold()
        except Exception as error:  # the build must not wait for any failure here
            self._fail(error)

    def _hold(self) -> None:
        since = time.strftime("%H:%M:%S")
        step = "compiling"
        while step:
            files.write_note(
                self._note,
                f"process {self._owner}, which has been building it since {since} ({step[:40]})",
            )
            self._settled.set()
            with suppress(queue.Empty):
                step = self._steps.get(timeout=HEARTBEAT) or ""
        with suppress(OSError):
            self._note.unlink()

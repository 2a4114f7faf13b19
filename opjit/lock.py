"""One builder per key on a machine. The lock saves duplicate work and carries no correctness: without it, two builders
publish the same bytes and one of them wins.

    <tmp>/opjit-<uid>/<key>.lock    flock(2): the kernel frees it when its holder dies
    <tmp>/opjit-<uid>/<key>.json    the holder's note: who, since when, at which step; written anew every second that it gets on

A thread of its own takes the lock, keeps the note and frees the lock, so that nothing which blocks there (a lock service that
is gone) can block the build. A waiter looks at the note, by its own clock: if that has not changed for SILENCE, the holder is
stopped or hung, and the waiter builds without the lock. filelock is not used: while its flock blocks, every os.fork of the process
blocks too.
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

from opjit import files, progress
from opjit.errors import CacheWarning

POLL = 0.05  # seconds between a waiter's looks at the note; the lock itself wakes it at once
BEAT = 1.0  # seconds between a holder's signs of life
SILENCE = 15.0  # seconds without one, after which a waiter goes on alone
IDLE = 30.0  # seconds without any work of the holder's compilers, after which it gives no more signs
LONGEST = 3600.0  # seconds in one step, likewise
_LEAVING = 5.0  # seconds that a holder waits for its lock to be freed
_OLD = 24 * 3600.0  # seconds after which a lock's file that nobody holds is removed
_open: set[int] = set()  # descriptors of lock files; a forked child must not keep them


def _after_fork() -> None:
    """The child has no thread that could free a lock, and would keep its parent's after the parent's death."""
    while _open:
        with suppress(OSError):
            os.close(_open.pop())


os.register_at_fork(after_in_child=_after_fork)


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
        try:
            keeper.start()
        except RuntimeError as error:  # the process may have no more threads
            keeper.fail(error)
        trouble = keeper.wait(waiting)
        if trouble is not None:
            warnings.warn(CacheWarning(f"building without a lock, so another process may build the same: {trouble}"), stacklevel=3)
        with progress.stepping(keeper.step):
            yield
    finally:
        keeper.leave()


class _Keeper(threading.Thread):
    """Takes a lock, holds it until it is told to leave, and shows meanwhile that the builder gets on.

    Attributes:
        settled: set when the lock is held, or cannot be.
        trouble: why it cannot be.
    """

    def __init__(self, key: str) -> None:
        super().__init__(name="opjit-lock", daemon=True)
        self.key = key
        self.settled = threading.Event()
        self.trouble: str | None = None
        self._owner = os.getpid()
        self._builder = threading.get_native_id()
        self._steps: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._note: Path | None = None
        self._taken = self._left = False

    # --- the builder's thread

    def fail(self, error: Exception) -> None:
        self.trouble = str(error)
        self.settled.set()

    def wait(self, waiting: Callable[[str], None]) -> str | None:
        """Until the lock is held (None), or there is a reason to go on without it."""
        told, seen, silent, last = "", None, 0.0, time.monotonic()
        while not self.settled.wait(POLL):
            sign = files.stamp(self._note) if self._note is not None else None
            now = time.monotonic()
            # a second at most: while this process was stopped itself, it did not listen
            silent, seen, last = (silent + min(now - last, 1.0) if sign == seen else 0.0), sign, now
            holder = _holder(self._note)
            if holder != told and not self._taken:  # else the note may be this process's own by now
                told = holder
                waiting(holder)
            if silent > SILENCE:
                return f"waited for {holder}, and it has given no sign of life for {silent:.0f} s"
        return self.trouble

    def step(self, name: str) -> None:
        if os.getpid() == self._owner:
            self._steps.put(name)

    def leave(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked child: the lock is its parent's
        self._left = True
        self._steps.put(None)
        if self.settled.is_set() and self.trouble is None:
            self.join(_LEAVING)

    # --- the keeper's own

    def run(self) -> None:
        try:
            place = folder()
            files.make_private(place)
            problem = files.distrusted(place)
            if problem:
                raise OSError(problem)
            self._note = place / f"{self.key}.json"
            descriptor = _take(place / f"{self.key}.lock")
        except Exception as error:  # whatever it is, the builder must not wait for it
            self.fail(error)
            return
        try:
            if not self._left:  # else it came too late, and is freed at once
                self._keep(self._note)
        finally:
            _free(descriptor)

    def _keep(self, note: Path) -> None:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        step: str | None = "compiling"
        self._taken = True
        files.write_note(note, json.dumps({**who, "step": step}))
        self.settled.set()
        _sweep(note.parent)  # the build has begun meanwhile
        pulse = _Pulse(self._builder)
        while step is not None:
            try:
                step = self._steps.get(timeout=BEAT)
                while step is not None and not self._steps.empty():
                    step = self._steps.get()
                pulse = _Pulse(self._builder)
            except queue.Empty:
                pass
            if step is not None and pulse.felt():
                files.write_note(note, json.dumps({**who, "step": step}))
        with suppress(OSError):
            note.unlink()


class _Pulse:
    """Whether one step of a build gets on: its processes use CPU time now and then, and it does not take an hour."""

    def __init__(self, builder: int) -> None:
        self._builder = builder
        self._began = self._looked = self._moved = time.monotonic()
        self._work: dict[str, tuple[bytes, ...]] = {}

    def felt(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= IDLE / 3:  # a look reads a file of every process of the machine
            before, self._work, self._looked = self._work, _work(self._builder), now
            if self._work != before or not self._work:
                self._moved = now
        return now - self._moved < IDLE and now - self._began < LONGEST


def _take(path: Path) -> int:
    """Wait for the lock; returns the descriptor that holds it.

    Raises:
        OSError, NotImplementedError: there is no locking there.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _open.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            _free(descriptor)
            raise
        _free(descriptor)  # somebody swept the file meanwhile: it guards nothing any more


def _free(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child that was forked just now and has a copy
    _open.discard(descriptor)
    with suppress(OSError):
        os.close(descriptor)


def _sweep(place: Path) -> None:
    """Once a day, remove what nobody uses. A lock's file goes while its lock is held, and who waited for it takes another then."""
    mark = place / "swept"
    try:
        if mark.is_file() and abs(time.time() - mark.stat().st_mtime) < _OLD:
            return
        mark.unlink(missing_ok=True)
        files.write_note(mark, "")
        for entry in os.scandir(place):
            if entry.is_file(follow_symlinks=False) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD:
                if entry.name.endswith(".lock"):
                    _remove_unheld(entry.path)
                elif ".json" in entry.name:  # the note of a holder that died, or half of one
                    os.unlink(entry.path)
    except OSError:
        pass  # a file that somebody else removed, or may remove tomorrow


def _remove_unheld(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    _open.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            os.unlink(path)
    except BlockingIOError:
        pass  # held
    finally:
        _free(descriptor)


def _holder(note: Path | None) -> str:
    """Who holds the lock, in words."""
    try:
        holder = json.loads(note.read_text()) if note is not None else {}
        since = time.strftime("%H:%M:%S", time.localtime(float(holder["since"])))
        return f"process {int(holder['pid'])}, which has been building it since {since} ({str(holder['step'])[:40]})"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process, which is building it"


def _work(builder: int) -> dict[str, tuple[bytes, ...]]:
    """What changes while a build gets on: the CPU time of the thread that builds, and of all processes that this one has started.

    Returns:
        Clock ticks by id, nothing where the system does not tell.
    """
    own = str(os.getpid())
    try:
        threads = {f"thread {builder}": _fields(f"/proc/self/task/{builder}/stat")[11:13]}
        processes = {name: fields for name in os.listdir("/proc") if name.isdecimal() and (fields := _fields(f"/proc/{name}/stat"))}
    except OSError:
        return {}
    family, before = {own}, 0
    while len(family) > before:
        before = len(family)
        family |= {name for name, fields in processes.items() if fields[1].decode() in family}
    return {**threads, **{name: processes[name][11:15] for name in family - {own}}}


def _fields(path: str) -> tuple[bytes, ...]:
    """The fields of a stat file of /proc from the state on; none if the process has ended."""
    try:
        with open(path, "rb") as file:
            return tuple(file.read().rpartition(b")")[2].split())
    except (FileNotFoundError, ProcessLookupError):
        return ()

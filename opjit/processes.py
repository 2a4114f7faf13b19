"""Commands that end with the process that waits for them, and what a fork of another thread must not cut in two.

A forked child has its parent's locks, modules and pipes, but none of its threads. So a lock that another thread held would never be
free, a module that it was importing would stay locked, and a command that it was starting would seem to run for as long as the child does.
"""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

_END = 2.0  # seconds that an interrupted command gets to end what it started
_locks: WeakSet[Lock] = WeakSet()
_collecting_later: list[int] = []  # an item for each `without_collection` under way


class Lock:
    """A re-entrant lock, which a forked child finds free.

    Args:
        patience: seconds that a fork in another thread waits for it; 0 is not at all, -1 for ever.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self._lock = threading.RLock()
        self.patience = patience
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # this is a child that was forked in the block: its lock is another one
            self._lock.release()

    def acquire_before_fork(self) -> None:
        self._lock.acquire(timeout=self.patience)

    def release_after_fork(self) -> None:
        with suppress(RuntimeError):  # the fork gave up waiting, or `watch_forks` was called while it waited
            self._lock.release()

    def renew(self) -> None:
        self._lock = threading.RLock()


# While one of these is held, forks of other threads wait. A fork takes them in this order, as does an op.py that builds.
reading = Lock(5.0)  # an op.py runs; not `declaring`, for which a module that the op.py imports, in another thread, may have to wait
declaring = Lock(-1)  # an op is half declared: a child could neither use it nor declare it
importing = Lock(5.0)  # a build's modules are being imported, for half a second; filelock, half imported, may wait for the fork itself
starting = Lock(5.0)  # a process is being started
_WATCHED = (reading, declaring, importing, starting)


def _before_fork() -> None:
    for lock in _WATCHED:
        lock.acquire_before_fork()


def _in_parent() -> None:
    for lock in reversed(_WATCHED):
        lock.release_after_fork()


def _in_child() -> None:
    for lock in list(_locks):
        lock.renew()
    if _collecting_later:
        _collecting_later.clear()
        gc.enable()


def watch_forks() -> None:
    """Have forks wait. Call it again after importing a module with hooks of its own: hooks run in the opposite order of registration,
    and an import that waits for such a module's hook would wait for a fork that waits for the import."""
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


watch_forks()


@contextmanager
def without_collection() -> Iterator[None]:
    """Suspend Python's garbage collector: as a build imports its modules, it would walk over all of torch's objects.

    0.1 s of a process's first build (tests/benchmarks/cold.py).
    """
    if not gc.isenabled():
        yield
        return
    _collecting_later.append(1)
    gc.disable()
    try:
        yield
    finally:
        if _collecting_later:  # else this is a forked child, which collects again
            _collecting_later.pop()
        gc.enable()


def run(command: Any, *, check: bool = False, echo: int | None = None, **settings: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, but an interrupt terminates the command, which can end what it started, and kills it only if that fails.

    Args:
        echo: a file descriptor that gets stdout, too, as it comes; stdout is a pipe then, and the only one.
        settings: of `subprocess.Popen`; stdin is no pipe.

    Raises:
        subprocess.CalledProcessError: `check` is set and the command failed.
    """
    with starting:
        process = subprocess.Popen(command, **settings)
    with process:
        try:
            output, errors = process.communicate() if echo is None else (_echoed(process, echo), None)
        except BaseException:
            process.terminate()
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _echoed(process: subprocess.Popen[bytes], to: int) -> bytes:
    """Copy a command's stdout to a file descriptor, while it is open. Returns all of it."""
    assert process.stdout is not None
    output = b""
    while part := os.read(process.stdout.fileno(), 1 << 16):
        output += part
        with suppress(OSError):
            os.write(to, part)
    process.wait()
    return output

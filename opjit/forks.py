"""What no fork of another thread may cut in two: a forked child has its parent's locks and files, and none of its threads.

A module that another thread was importing is locked in the child for good. What a build needs is imported by the thread that builds first,
for much of that build's time. And of a process that another thread was starting, the child has the ends of the pipes: who waits in the
parent for the process to close them, waits for the child too. So a fork waits until neither is under way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PATIENCE = 5.0  # seconds that a fork waits; the imports take half of one, but filelock, half imported, may wait for the fork
# Who holds one takes no other lock of opjit's. They are two, so that no process waits for the imports of another thread.
_importing = threading.RLock()
_starting = threading.RLock()


@contextmanager
def importing() -> Iterator[None]:
    """While the block imports, the forks of other threads wait."""
    with _importing:
        yield


@contextmanager
def starting() -> Iterator[None]:
    """While the block starts a process, the forks of other threads wait."""
    with _starting:
        yield


def _acquire() -> None:
    for lock in (_importing, _starting):
        lock.acquire(timeout=_PATIENCE)


def _release() -> None:
    for lock in (_starting, _importing):
        with suppress(RuntimeError):  # the wait had ended without it
            lock.release()


def _renew() -> None:
    global _importing, _starting
    _importing, _starting = threading.RLock(), threading.RLock()


def watch() -> None:
    """Have forks wait; see `registration.watch`."""
    os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_renew)

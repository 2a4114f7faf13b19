"""Imports that no fork may cut in two.

A forked child has its parent's import locks and none of its threads: a module that another thread was importing is locked in the child
for good. What a build needs is imported by the thread that builds first, for much of that build's time; so a fork waits until it is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PATIENCE = 5.0  # seconds that a fork waits; the imports take half of one, but filelock, half imported, may wait for the fork
_importing = threading.RLock()  # who holds it takes no other lock of opjit's


@contextmanager
def importing() -> Iterator[None]:
    """While the block imports, the forks of other threads wait."""
    with _importing:
        yield


def _acquire() -> None:
    _importing.acquire(timeout=_PATIENCE)


def _release() -> None:
    with suppress(RuntimeError):  # the wait had ended without it
        _importing.release()


def _renew() -> None:
    global _importing
    _importing = threading.RLock()


def watch() -> None:
    """Have forks wait; see `registration.watch`."""
    os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_renew)

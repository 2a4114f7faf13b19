"""Slots for builds: how many of them a user's ranks run on one machine at a time.

A slot is a lock of `opjit.lock`, and the note of who holds it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from opjit import files, lock


def take(stack: ExitStack, jobs: int, seen: dict[int, tuple[object, float]]) -> bool:
    """Take one of the builds that this user's ranks run on this machine at a time; whether there was one to take. The kernel frees it when
    its holder dies; one whose holder gives no sign of life does not count.

    Args:
        stack: gives it back.
        jobs: how many there are.
        seen: the notes of who has one, and when they changed by this rank's clock; kept from one call to the next.
    """
    for number in range(jobs):
        name = f"building-{number}"
        release = lock.attempt(name)
        if release is not None:
            stack.callback(release)
            return True
        sign, now = files.stamp(lock.folder() / f"{name}.json"), time.monotonic()
        if number not in seen or seen[number][0] != sign:
            seen[number] = sign, now
        elif now - seen[number][1] > lock.SILENCE:
            return True
    return False

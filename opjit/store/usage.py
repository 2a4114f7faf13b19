"""Counts of requests, which a process appends to the cache as one line when it exits: the time, and
its hits, fetches and builds.

A process does not leave a line if it is killed, or if its cache is missing, read-only or owned by
another user.
"""

import os
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from opjit import files, processes
from opjit.errors import EntryError

NAME = "usage"
KINDS = ("hits", "fetches", "builds")
# The largest size of the file. After some 50,000 processes, the counting starts again.
MAX_BYTES = 1 << 20
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK
_counts: Counter[tuple[Path, str]] = Counter()
_lock = processes.Lock()
os.register_at_fork(after_in_child=_counts.clear)  # the parent's counts stay with the parent


def count(base: Path, kind: str) -> None:
    with _lock:
        if not _counts:
            files.at_end(_write)
        _counts[base, kind] += 1


def total(base: Path) -> tuple[int, ...]:
    """Return when the counting began, 0 for never, and the sums of `KINDS`, this process's included."""
    content = _line(base)
    with suppress(OSError, EntryError):
        content += files.read(base / NAME, 2 * MAX_BYTES)
    # Undamaged.
    rows = [
        [*map(int, line.split())]
        for line in content.splitlines()
        if re.fullmatch(rb"\d{1,15}( \d{1,15}){3}", line)
    ]
    return (
        min((row[0] for row in rows), default=0),
        *(sum(row[place] for row in rows) for place in (1, 2, 3)),
    )


def _line(base: Path) -> bytes:
    counts = [_counts[base, kind] for kind in KINDS]
    return b"%d %d %d %d\n" % (time.time(), *counts) if any(counts) else b""


def _write() -> None:
    for base in {base for base, _ in _counts}:
        with suppress(OSError):
            if os.lstat(base).st_uid == os.geteuid() and files.replacement_risk(base) is None:
                with open(
                    base / NAME,
                    "ab",
                    opener=lambda name, mode: os.open(name, mode | _SAFELY, 0o600),
                ) as file:
                    if file.tell() > MAX_BYTES:
                        file.truncate(0)
                    file.write(_line(base))
    _counts.clear()

"""What this process asked the cache for: plain numbers, written as one line into the cache when the process ends.

    <root>/v1/stats.jsonl    a line for each process, appended by one write

A request adds a few integers and writes nothing. Where the cache is not there or cannot be written, nothing is kept. What is kept is
only for people to read: `opjit cache stats` adds it up; see tally.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from opjit import files

NAME = "stats.jsonl"
MAX_BYTES = 8 << 20  # a longer one gets no more lines
WHERE = ("layer", "store", "remote")  # of a hit
FIELDS = (*WHERE, "misses", "builds", "bytes", "saved")

_counts: dict[Path, dict[str, float]] = {}  # by the folder of the store
_registered = False


def hit(where: str, base: Path, seconds: float, started: float) -> None:
    """Count a binary that was there already.

    Args:
        where: one of `WHERE`.
        base: folder of the store that was asked.
        seconds: that its build had taken.
        started: time.perf_counter() of the request.
    """
    counts = _of(base)
    counts[where] += 1
    counts["saved"] += max(0.0, seconds - (time.perf_counter() - started))


def miss(base: Path) -> None:
    """Count a binary that was nowhere."""
    _of(base)["misses"] += 1


def built(base: Path, size: int) -> None:
    """Count a build that left a binary of so many bytes."""
    counts = _of(base)
    counts["builds"] += 1
    counts["bytes"] += size


def of_process(base: Path) -> list[dict[str, float]]:
    """What this process has counted and not written yet: one line, or none."""
    return [{"at": int(time.time()), **_counts[base]}] if base in _counts else []


def _of(base: Path) -> dict[str, float]:
    global _registered
    if base not in _counts:
        if not _registered:
            _registered = True
            files.at_end(write)
        _counts[base] = dict.fromkeys(FIELDS, 0)
    return _counts[base]


def write() -> None:
    """Append what was counted to the stores that there are; no trouble is an error."""
    for base, counts in _counts.items():
        append(base, {**counts, "saved": round(counts["saved"], 3)})
    _counts.clear()


def append(base: Path, counts: Mapping[str, float]) -> None:
    """Append a line for what was counted up to now."""
    line = json.dumps({"at": int(time.time()), **counts}, separators=(",", ":")) + "\n"
    with suppress(OSError):
        if os.lstat(base).st_uid != os.geteuid():
            return  # a cache of root's, say, which others only read
        file = os.open(base / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size < MAX_BYTES:
                os.write(file, line.encode())
        finally:
            os.close(file)


def _forget() -> None:
    """What a parent counted is the parent's."""
    global _registered
    _counts.clear()
    _registered = False


os.register_at_fork(after_in_child=_forget)

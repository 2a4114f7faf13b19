"""Counters of hits, misses and builds. A process appends them to the cache as one line when it ends.

    <root>/v1/stats.jsonl    one line per process, appended by one write

A request only adds a few integers. If the cache is missing or not writable, the counters are dropped. They serve `opjit cache stats`
and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from opjit import files
from opjit.store.entry import Entry

NAME = "stats.jsonl"
MAX_BYTES = 8 << 20  # of the file; the counting starts anew beyond them, after some 50,000 processes
WHERE = ("layer", "store", "remote")  # a hit's origin
FIELDS = (*WHERE, "misses", "builds", "bytes", "saved")
_NAMES = ("at", *FIELDS)

_counts: dict[Path, dict[str, float]] = {}  # by store
os.register_at_fork(after_in_child=_counts.clear)  # the parent's counts stay with the parent


def hit(entry: Entry, base: Path, started: float) -> None:
    """Count a hit.

    Args:
        base: folder of the store.
        started: time.perf_counter() of the request.
    """
    counts = _of(base)
    counts[entry.origin] += 1
    counts["saved"] += max(0.0, entry.seconds - (time.perf_counter() - started))


def miss(base: Path) -> None:
    """Count a miss."""
    _of(base)["misses"] += 1


def built(base: Path, size: int) -> None:
    """Count a build and the bytes of its binary."""
    counts = _of(base)
    counts["builds"] += 1
    counts["bytes"] += size


def of_process(base: Path) -> list[dict[str, float]]:
    """Return the counts that this process has not written yet: one line, or none."""
    return [{"at": int(time.time()), **_counts[base]}] if base in _counts else []


def _of(base: Path) -> dict[str, float]:
    if not _counts:
        files.at_end(write)
    return _counts.setdefault(base, dict.fromkeys(FIELDS, 0))


def write() -> None:
    """Append the counts to each store; failures are ignored."""
    for base, counts in _counts.items():
        append(base, {**counts, "saved": round(counts["saved"], 3)})
    _counts.clear()


def append(base: Path, counts: Mapping[str, float]) -> None:
    """Append one line of counts."""
    line = json.dumps({"at": int(time.time()), **counts}, separators=(",", ":")) + "\n"
    with suppress(OSError):
        if os.lstat(base).st_uid != os.geteuid() or files.swappable(base) is not None:
            return  # such as a cache of root's, which this user only reads, or one that is not used
        file = os.open(base / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size >= MAX_BYTES:
                os.truncate(file, 0)
            os.write(file, line.encode())
        finally:
            os.close(file)


def lines(path: Path) -> Iterator[dict[str, float]]:
    """Yield a file's lines, without damaged ones."""
    try:
        with open(path, "rb", opener=_open_plain) as file:
            content = file.read(2 * MAX_BYTES)
    except OSError:
        return
    for line in filter(None, content.splitlines()):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and all(type(fields.get(name)) in (int, float) and 0 <= fields[name] < 2**63 for name in _NAMES):
            yield {name: fields[name] for name in _NAMES}


def total(counted: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sum lines up; "at" is the earliest date, if there is any."""
    found: dict[str, float] = dict.fromkeys(FIELDS, 0)
    for line in counted:
        found.update({name: found[name] + line[name] for name in FIELDS}, at=min(found.get("at", line["at"]), line["at"]))
    return found


def _open_plain(name: str, flags: int) -> int:
    """Follow no symbolic link; do not block on a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

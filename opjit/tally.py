"""What processes counted, added up; see counters.py for who writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from opjit import counters, removal
from opjit.store import Store

COMPACT_BYTES = 1 << 20
_SHORTEST = 40  # characters of a line; a file full of less is not worth a minute
_NAMES = ("at", *counters.FIELDS)


def lines(path: Path) -> Iterator[dict[str, float]]:
    """The lines of a file of counts, without the damaged ones."""
    try:
        with open(path, "rb", opener=_open_plain) as file:
            content = file.read(2 * counters.MAX_BYTES)
    except OSError:
        return
    for line in content.splitlines():
        if len(line) < _SHORTEST:
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and all(type(fields.get(name)) in (int, float) and 0 <= fields[name] < 2**63 for name in _NAMES):
            yield {name: fields[name] for name in _NAMES}


def total(counted: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sum of lines, with the earliest date as "at" where there is one."""
    found: dict[str, float] = dict.fromkeys(counters.FIELDS, 0)
    for line in counted:
        found.update({name: found[name] + line[name] for name in counters.FIELDS}, at=min(found.get("at", line["at"]), line["at"]))
    return found


def compact(store: Store, trash: removal.Trash) -> None:
    """Make one line of a file that has grown long. A line that a process appends at this moment may be lost."""
    path, aside = store.base / counters.NAME, trash.folder / counters.NAME
    try:
        if path.stat().st_size <= COMPACT_BYTES:
            return
        os.rename(path, aside)
    except OSError:
        return
    counters.append(store.base, total(lines(aside)))
    trash.take(aside)


def _open_plain(name: str, flags: int) -> int:
    """No symbolic link, and no waiting for the other end of a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

"""The cache, for Python code: where it is, what is in it, what it was good for, and keeping it in order.

    >>> opjit.cache.stats().hits
    1204
    >>> opjit.cache.prune(size="2GiB", age="30d").freed
    18432

`opjit cache` is the same at the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from opjit import checkup, counters, inventory, removal, tally
from opjit import prune as _pruning
from opjit.checkup import Finding
from opjit.errors import BadSetting
from opjit.inventory import Item
from opjit.prune import AGE, Pruned
from opjit.removal import Cleared
from opjit.store import Store, default_root

__all__ = ["Cleared", "Finding", "Item", "Pruned", "Stats", "clear", "entries", "path", "prune", "stats", "verify"]


class Stats(NamedTuple):
    """What the cache holds, and what it was good for.

    Attributes:
        entries, size: how many, and their bytes.
        hits: requests that found a binary, and of them `by_place`: in a layer, in the store, in the remote.
        misses: requests that found none.
        builds, built: how many builds left a binary, and their bytes.
        saved: seconds of builds that hits made unnecessary, less the time of the look-ups.
        since: of the first count, in seconds since 1970; None if there is none.
    """

    entries: int
    size: int
    hits: int
    by_place: Mapping[str, int]
    misses: int
    builds: int
    built: int
    saved: float
    since: float | None


def path() -> Path:
    """The cache's folder, which OPJIT_CACHE names; it may not be there yet."""
    return default_root()


def entries() -> list[Item]:
    """What the folders tell of the entries, by op, arch and key; nothing is verified, and no file is opened."""
    return sorted(inventory.scan(Store(default_root())), key=lambda item: (item.op, item.arch, item.key))


def stats() -> Stats:
    """What the cache holds, and what all processes and this one had from it.

    A process counts in memory and leaves its numbers when it ends, so those that run, or were killed, are not in it.
    """
    store = Store(default_root())
    items = list(inventory.scan(store))
    counted = tally.total([*tally.lines(store.base / counters.NAME), *counters.of_process(store.base)])
    by_place = {where: int(counted[where]) for where in counters.WHERE}
    return Stats(len(items), sum(item.size for item in items), sum(by_place.values()), by_place, int(counted["misses"]),
                 int(counted["builds"]), int(counted["bytes"]), counted["saved"], counted.get("at"))


def verify(*, rebuild: bool = False) -> list[Finding]:
    """Hold each entry against its manifest, as before it is loaded. Nothing is changed: what is bad is replaced when it is asked for.

    Args:
        rebuild: also build each entry again that a declared op would have today, and compare the bytes.
    """
    return list(checkup.verify(Store(default_root()), rebuild))


def prune(size: int | str | None = None, age: float | str | None = None) -> Pruned:
    """Remove the entries that nobody used for long, then those not used for longest until the rest is small enough.

    What a process has loaded keeps working there. What appeared within the last hour stays.

    Args:
        size: bytes, or ``"5GiB"``; 0 is no bound; None is OPJIT_CACHE_SIZE, else 10 GiB.
        age: seconds, or ``"30d"``; 0 is no bound; None is 90 days.

    Raises:
        BadSetting: a size or an age is none.
        OpjitError: nothing can be removed.
    """
    bound = _pruning.size_wanted() if size is None else _pruning.parse_size(size) if isinstance(size, str) else size
    oldest = AGE if age is None else _pruning.parse_age(age) if isinstance(age, str) else age
    if not (bound >= 0 and oldest >= 0):
        raise BadSetting(f"expected a size and an age of 0 or more, got {size!r} and {age!r}")
    return _pruning.prune(Store(default_root()), bound, oldest)


def clear(*ops: str) -> Cleared:
    """Remove the entries of ops, or everything. What a process has loaded keeps working there.

    Raises:
        BadSetting: the cache has no entry of one of the ops; nothing was removed.
        OpjitError: nothing can be removed.
    """
    return removal.clear(Store(default_root()), ops)

"""The cache, for Python code: its folder, its entries, its statistics, and its maintenance.

    >>> [item.op for item in opjit.cache.entries()]
    ['opjit::allreduce']
    >>> opjit.cache.prune(size="2GiB", age="30d").removed
    0

`opjit cache` does the same on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from opjit.cache import verification
from opjit.cache.verification import Finding
from opjit.errors import BadSetting
from opjit.store import inventory, usage
from opjit.store import prune as _pruning
from opjit.store.inventory import Item
from opjit.store.prune import AGE, Cleared, Pruned
from opjit.store.store import Store, default_root

__all__ = ["Cleared", "Finding", "Item", "Pruned", "Stats", "clear", "entries", "path", "prune", "stats", "verify"]


class Stats(NamedTuple):
    """Count what the cache holds, and what it has saved.

    Attributes:
        entries, size: the number of entries, and their bytes.
        hits: requests that found a binary; `by_place` counts them by where: a layer, the store or the remote.
        misses: requests that found no binary.
        builds, built: builds that made a binary, and the binaries' bytes.
        saved: seconds of builds that hits avoided, minus the time of the look-ups.
        since: the time of the first count, in seconds since 1970; None without any count.
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
    """Return the cache's folder, which OPJIT_CACHE names; it may not exist yet.

    Example:
        >>> opjit.cache.path()
        PosixPath('…')
    """
    return default_root()


def entries() -> list[Item]:
    """List all entries, sorted by op, arch and key, as their folders show them; nothing is verified and no file is opened.

    Example:
        >>> [(item.op, item.arch) for item in opjit.cache.entries()]
        [('opjit::allreduce', 'x86-64-v…')]
    """
    return sorted(inventory.scan(Store(default_root())), key=lambda item: (item.op, item.arch, item.key))


def stats() -> Stats:
    """Count what the cache holds, and what it has saved all processes that have ended, and this one.

    A process counts in memory and writes its numbers when it exits, so running and killed processes are missing.

    Example:
        >>> before = opjit.cache.stats().builds
        >>> opjit.get("round_ste", "cpu")
        <OpOverload(op='opjit.round_ste', overload='default')>
        >>> opjit.cache.stats().builds - before
        1
    """
    store = Store(default_root())
    items = list(inventory.scan(store))
    counted = usage.total([*usage.lines(store.base / usage.NAME), *usage.of_process(store.base)])
    by_place = {where: int(counted[where]) for where in usage.WHERE}
    return Stats(len(items), sum(item.size for item in items), sum(by_place.values()), by_place, int(counted["misses"]),
                 int(counted["builds"]), int(counted["bytes"]), counted["saved"], counted.get("at"))


def verify(*, rebuild: bool = False) -> list[Finding]:
    """Compare each entry with its manifest, as a load does. Nothing is changed: the next request for a bad entry replaces it.

    Args:
        rebuild: also build the entries of declared ops again, and compare the bytes.

    Example:
        >>> [(finding.item.op, finding.verdict) for finding in opjit.cache.verify()]
        [('opjit::allreduce', 'good')]
    """
    return list(verification.verify(Store(default_root()), rebuild))


def prune(size: int | str | None = None, age: float | str | None = None) -> Pruned:
    """Remove entries unused for longer than `age`, then the least recently used ones until the rest fits `size`.

    Loaded binaries keep working. Entries younger than an hour stay.

    Args:
        size: bytes, or ``"5GiB"``; 0 is no limit; None is OPJIT_CACHE_SIZE, else 10 GiB.
        age: seconds, or ``"30d"``; 0 is no limit; None is 90 days.

    Raises:
        BadSetting: the size or the age is invalid.
        OpjitError: the cache cannot be written, or is not yours alone.

    Example:
        >>> opjit.cache.prune(size="2GiB", age="30d").freed
        0
    """
    bound = _pruning.size_wanted() if size is None else _pruning.parse_size(size) if isinstance(size, str) else size
    oldest = AGE if age is None else _pruning.parse_age(age) if isinstance(age, str) else age
    if not (bound >= 0 and oldest >= 0):
        raise BadSetting(f"expected a size and an age of 0 or more, got {size!r} and {age!r}")
    return _pruning.prune(Store(default_root()), bound, oldest)


def clear(*ops: str) -> Cleared:
    """Remove the entries of ops, or everything. Loaded binaries keep working.

    Raises:
        BadSetting: the cache has no entry of one of the ops; nothing was removed.
        OpjitError: the cache cannot be written, or is not yours alone.

    Example:
        >>> opjit.cache.clear("allreduce").removed
        1
    """
    return _pruning.clear(Store(default_root()), ops)

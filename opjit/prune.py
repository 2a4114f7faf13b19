"""Keeping a store within bounds: entries that nobody has used for long go, and the ones not used for longest where it is too large.

A hit writes nothing, so when an entry was used is what the filesystem notes of reads: by a day on most, and only the day when it was
built where reads are not noted (noatime). An entry that appeared within the last hour stays whatever its dates say.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from typing import NamedTuple

from opjit import files, inventory, removal, tally
from opjit.errors import BadSetting, CacheWarning
from opjit.inventory import Item
from opjit.publication import MARKER
from opjit.store import Store

DAY = 86400.0  # seconds
SIZE = 10 << 30  # bytes, where OPJIT_CACHE_SIZE does not say
AGE = 90 * DAY
_FRESH = 3600.0  # seconds; also how far a date may lie ahead of the filesystem's clock
_BUDGET = 2.0  # seconds, of a build's time
_LONGEST = 20  # characters of a size or an age
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": DAY, "d": DAY, "w": 7 * DAY}


class Pruned(NamedTuple):
    """What `prune` did.

    Attributes:
        removed, freed: entries, and their bytes.
        kept, size: entries that are left, and their bytes.
        failed: entries that should have gone and could not be removed.
        fresh: entries that would have gone, but appeared within the last hour.
        notes: logs of failed builds, notes on compilers, and what links are made against, that went for their age.
        finished: whether all was looked at; False where the time was up.
    """

    removed: int
    freed: int
    kept: int
    size: int
    failed: int
    fresh: int
    notes: int
    finished: bool


def parse_size(text: str) -> int:
    """Bytes: ``"5GiB"``, ``"5G"`` (the same), ``"5GB"`` (of 1000), ``"0"``.

    Raises:
        BadSetting: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or len(text) > _LONGEST:
        raise BadSetting(f"expected a size such as 5GiB, 500MB or 0 for no bound, got {text!r}")
    unit = 1000 if found[4] and found[2] and not found[3] else 1024
    return int(float(found[1]) * unit ** " kmgt".index(found[2].lower() or " "))


def parse_age(text: str) -> float:
    """Seconds: ``"30d"``, ``"12h"``, ``"2w"``; a number alone is days, and 0 is no bound.

    Raises:
        BadSetting: it is no age.
    """
    found = _AGE.fullmatch(text.strip())
    if found is None or len(text) > _LONGEST:
        raise BadSetting(f"expected an age such as 30d, 12h, 2w or 0 for no bound, got {text!r}")
    return float(found[1]) * _SECONDS[found[2].lower()]


def size_wanted() -> int:
    """$OPJIT_CACHE_SIZE in bytes, else 10 GiB; 0 is no bound.

    Raises:
        BadSetting: it is no size.
    """
    configured = os.environ.get("OPJIT_CACHE_SIZE")
    if not configured:
        return SIZE
    try:
        return parse_size(configured)
    except BadSetting as error:
        raise BadSetting(f"OPJIT_CACHE_SIZE: {error}") from None


def prune(store: Store, size: int, age: float = AGE, budget: float = math.inf) -> Pruned:
    """Remove the entries not used for `age` seconds, then those not used for longest until the rest has at most `size` bytes.

    Args:
        size, age: 0 is no bound.
        budget: seconds after which it stops where it is.

    Raises:
        Unremovable: the store cannot be written, or others can write there.
    """
    if not os.path.isdir(store.base):
        return Pruned(0, 0, 0, 0, 0, 0, 0, True)
    until = time.monotonic() + budget
    with removal.open_trash(store) as trash:
        now = trash.now
        dated = sorted(((_used(item, now), item) for item in inventory.scan(store)), key=lambda pair: pair[0])
        left, total = len(dated), sum(item.size for _, item in dated)
        removed, freed, failed, fresh, finished = 0, 0, 0, 0, True
        for used, item in dated:
            if not (age and used < now - age) and not (size and total > size):
                continue
            if time.monotonic() > until:
                finished = False
                break
            if abs(now - item.published) < _FRESH:
                fresh += 1
            elif trash.take_entry(item):
                removed, freed, left, total = removed + 1, freed + item.size, left - 1, total - item.size
            else:
                failed += 1
        notes = removal.sweep(store, trash, lambda used: bool(age) and used < now - age) if finished else 0
        tally.compact(store, trash)
    return Pruned(removed, freed, left, total, failed, fresh, notes, finished)


def after_build(store: Store) -> None:
    """Prune when something was published; see `publication`. No trouble is an error: what was asked for is there."""
    marker = store.base / MARKER
    try:
        if marker.is_symlink() or not marker.is_file():
            with removal.open_trash(store) as trash:
                trash.take(marker)
        files.write_note(marker, "")  # first, so that of many processes few prune
        done = prune(store, size_wanted(), budget=_BUDGET)
        if not done.finished:
            os.utime(marker, (0, 0))  # the next build goes on
        if done.failed:
            warnings.warn(CacheWarning(f"{done.failed} entries of the cache {store.root} should go and could not be removed; see "
                                       "`opjit cache prune`"), stacklevel=2)
    except BadSetting as error:
        warnings.warn(CacheWarning(f"the cache is not pruned: {error}"), stacklevel=2)
    except (OSError, removal.Unremovable):
        pass


def _used(item: Item, now: float) -> float:
    """When an entry was used last. A date ahead of the clock says nothing; then it is when it appeared, and if that is ahead too, never."""
    return max((date for date in (item.read, item.written) if date <= now + _FRESH),
               default=item.published if item.published <= now + _FRESH else 0.0)

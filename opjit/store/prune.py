"""Pruning: removes entries that are too old, then the least recently used ones until the store fits its bound.

An entry is renamed into a staging folder and deleted there. A process that has mapped its library keeps using it; one that was about to
open it finds a miss and requests it again. Other builds' staging folders stay.

A hit writes nothing, so the last use is the library's access time: accurate to a day on most filesystems. Under noatime, the build date
is used. An entry that is less than an hour old stays, whatever its dates say.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from opjit import files
from opjit.errors import BadSetting, CacheWarning, OpjitError, UntrustedFolder
from opjit.recipe import toolchain
from opjit.store import inventory
from opjit.store.inventory import Item
from opjit.store.store import Store

DAY = 86400.0  # seconds
SIZE = 10 << 30  # bytes; the default of OPJIT_CACHE_SIZE
AGE = 90 * DAY
_FRESH = 3600.0  # seconds; also the tolerance for dates in the future
_THREADS = 8  # that clear the cache: a filesystem lets a folder's removal wait for its journal; 3,000 took 17 s one by one, and 1.4 s so
_BUDGET = 2.0  # seconds that pruning may take after a build
MARKER = "pruned"  # a file in the store; its date is that of the last pruning after a build
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_AGE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([smhdw]?)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": DAY, "d": DAY, "w": 7 * DAY}
# opjit's own file names in a store's special folders; _UNFINISHED is a file whose writer was killed.
_NAMES = {"logs": re.compile(r".+\.log"), "toolchain": toolchain.NOTE,
          "parts": re.compile(r"[0-9a-f]{64}")}
_UNFINISHED = re.compile(r"\.(.+\.)?[0-9a-f]{32}")


class Unremovable(OpjitError):
    """Nothing can be removed: the cache is not writable, or other users could replace it."""


class Cleared(NamedTuple):
    """The result of `clear`: entries removed, their bytes, and entries that could not be removed."""

    removed: int
    freed: int
    failed: int


class Trash(NamedTuple):
    """A folder on the store's filesystem in which files are deleted.

    Attributes:
        now: the time by that filesystem's clock.
    """

    folder: Path
    now: float

    def take(self, path: Path) -> bool:
        """Remove a file or folder. Returns False if it is still there."""
        aside = self.folder / files.unique()
        try:
            os.rename(path, aside)
        except OSError:
            return not os.path.lexists(path)
        files.remove_tree(aside)
        return not os.path.lexists(aside)

    def remove(self, item: Item) -> bool:
        """Remove an entry."""
        return self.take(item.folder)


def _drop_empty(gone: Iterable[Item]) -> None:
    """Remove the folders of archs and ops in which no entry is left: each once, as rmdir reads a folder that held many to its end."""
    for folder in {item.folder.parent for item in gone}:
        with suppress(OSError):
            os.rmdir(folder)
            os.rmdir(folder.parent)


@contextmanager
def open_trash(store: Store) -> Iterator[Trash]:
    """Create the trash of a store, and delete it afterwards. Raises Unremovable if the store is not writable, or other users could replace
    it."""
    try:
        folder = store.stage()
        now = folder.stat().st_mtime
    except UntrustedFolder as error:
        raise Unremovable(f"nothing was removed from the cache {store.root}: {error}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (store.base / "staging").is_dir():
            raise Unremovable(f"nothing can be removed from the cache {store.root}: {error}") from error
        yield Trash(store.base / "staging", time.time())  # the disk has no room for another folder
        return
    try:
        yield Trash(folder, now)
    finally:
        files.remove_tree(folder)


def clear(store: Store, ops: Sequence[str] = ()) -> Cleared:
    """Remove the entries of some ops, or everything: entries, notes and counters; see `opjit.cache.clear`."""
    items = list(inventory.scan(store))
    if ops:
        wanted = {op if "::" in op else f"opjit::{op}" for op in ops}
        cached = {item.op for item in items}
        for op in sorted(wanted - cached):
            raise BadSetting(f"the cache has no entry of {op}; `opjit cache ls` lists its entries")
        items = [item for item in items if item.op in wanted]
    if not os.path.isdir(store.base):
        return Cleared(0, 0, 0)
    with open_trash(store) as trash:
        with ThreadPoolExecutor(_THREADS) as pool:
            gone = [item for item, removed in zip(items, pool.map(trash.remove, items), strict=True) if removed]
        _drop_empty(gone)
        if not ops:
            sweep(store, trash, lambda _: True, ("logs", "toolchain"))
    return Cleared(len(gone), sum(item.size for item in gone), len(items) - len(gone))


def sweep(store: Store, trash: Trash, old: Callable[[float], bool], kinds: Sequence[str] = tuple(_NAMES)) -> None:
    """Remove compiler notes, logs of failed builds and linked parts.

    Args:
        old: whether to remove a file that was last used at a given time.
        kinds: names of the folders. Files with names that opjit never gives stay.
    """
    for kind in kinds:
        with suppress(OSError), os.scandir(store.base / kind) as found:
            for entry in found:
                if (_NAMES[kind].fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name)) and old(_last_use(entry)):
                    trash.take(Path(entry.path))


def _last_use(entry: os.DirEntry[str]) -> float:
    """Return when a file, or a file in a folder, was last read or written."""
    try:
        status = entry.stat(follow_symlinks=False)
        if not entry.is_dir(follow_symlinks=False):
            return max(status.st_atime, status.st_mtime)
        with os.scandir(entry.path) as found:
            return max([status.st_mtime, *(_last_use(file) for file in found)])
    except OSError:
        return 0.0


class Pruned(NamedTuple):
    """The result of `prune`.

    Attributes:
        removed, freed: entries removed, and their bytes.
        kept, size: entries left, and their bytes.
        failed: entries that could not be removed.
        fresh: entries spared because they are less than an hour old.
        finished: False if the time budget ran out first.
    """

    removed: int
    freed: int
    kept: int
    size: int
    failed: int
    fresh: int
    finished: bool


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``"5GiB"``, ``"5G"`` (the same), ``"5GB"`` (powers of 1000), ``"0"``. Raises BadSetting if it is none."""
    found = _matched(_SIZE, text, "a size such as 5GiB, 500MB or 0 for no bound")
    unit = 1000 if found[4] and found[2] and not found[3] else 1024
    return int(float(found[1]) * unit ** " kmgt".index(found[2].lower() or " "))


def parse_age(text: str) -> float:
    """Parse an age into seconds: ``"30d"``, ``"12h"``, ``"2w"``; a plain number means days. Raises BadSetting if it is none."""
    found = _matched(_AGE, text, "an age such as 30d, 12h, 2w or 0 for no bound")
    return float(found[1]) * _SECONDS[found[2].lower()]


def _matched(pattern: re.Pattern[str], text: str, expected: str) -> re.Match[str]:
    found = pattern.fullmatch(text.strip())
    if found is None:
        raise BadSetting(f"expected {expected}, got {text!r}")
    return found


def size_wanted() -> int:
    """OPJIT_CACHE_SIZE in bytes, by default 10 GiB; 0 means no bound. Raises BadSetting if it is not a size."""
    configured = os.environ.get("OPJIT_CACHE_SIZE")
    if not configured:
        return SIZE
    try:
        return parse_size(configured)
    except BadSetting as error:
        raise BadSetting(f"OPJIT_CACHE_SIZE: {error}") from None


def prune(store: Store, size: int, age: float = AGE, budget: float = math.inf) -> Pruned:
    """Remove entries unused for `age` seconds, then the least recently used ones until at most `size` bytes are left; see
    `opjit.cache.prune`.

    Args:
        budget: seconds after which to stop.
    """
    if not os.path.isdir(store.base):
        return Pruned(0, 0, 0, 0, 0, 0, True)
    until = time.monotonic() + budget
    with open_trash(store) as trash:
        now = trash.now
        entries = sorted(((_used(item, now), item) for item in inventory.scan(store)), key=lambda pair: pair[0])
        total = sum(item.size for _, item in entries)
        gone, freed, failed, fresh, finished = list[Item](), 0, 0, 0, True
        for used, item in entries:
            if not (age and used < now - age) and not (size and total - freed > size):
                continue
            if time.monotonic() > until:
                finished = False
                break
            if abs(now - item.published) < _FRESH:
                fresh += 1
            elif trash.remove(item):
                gone.append(item)
                freed += item.size
            else:
                failed += 1
        _drop_empty(gone)
        if finished and age:  # a build that is under way may need what was used within the hour
            sweep(store, trash, lambda used: used < now - max(age, _FRESH))
    return Pruned(len(gone), freed, len(entries) - len(gone), total - freed, failed, fresh, finished)


def after_build(store: Store, published: Path) -> None:
    """Prune the store unless a build did so within a day. A failure is no error, as the requested binary is there.

    The first build in a new store only sets the date.

    Args:
        published: folder of the entry that was built.
    """
    marker = store.base / MARKER
    try:
        if not os.path.lexists(marker):
            files.write_note(marker, "")
            return
        last = os.lstat(marker)
        if stat.S_ISREG(last.st_mode) and abs(os.stat(published).st_ctime - last.st_mtime) < DAY:  # by one clock
            return
        if stat.S_ISDIR(last.st_mode):
            files.remove_tree(marker)
        files.write_note(marker, "")  # first, so that few of many processes prune
        done = prune(store, size_wanted(), budget=_BUDGET)
        if not done.finished:
            os.utime(marker, (0, 0))  # the next build continues
        if done.failed:
            warnings.warn(CacheWarning(f"{done.failed} old entries of the cache {store.root} could not be removed; check "
                                       "their permissions and run `opjit cache prune`"), stacklevel=2)
    except BadSetting as error:
        warnings.warn(CacheWarning(f"the cache was not pruned: {error}"), stacklevel=2)
    except (OSError, Unremovable):
        pass


def _used(item: Item, now: float) -> float:
    """An entry's last use. Dates in the future are ignored: then it is the date of publication, or 0 if that is in the future too."""
    return max((date for date in (item.read, item.written) if date <= now + _FRESH),
               default=item.published if item.published <= now + _FRESH else 0.0)

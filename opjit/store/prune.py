"""Pruning: removes entries that are too old, then the least recently used ones until the store fits
its bound.

An entry is renamed into the staging folder and deleted there. If a process has mapped its library,
it keeps using it. If a process was about to open it, it requests it again. Because a hit does not
write anything, the last use is the library's access time, which is accurate to a day on most
filesystems. Under noatime, it is the date of the build.
"""

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from opjit import files, processes
from opjit.errors import BadSetting, OpjitError, UntrustedFolder, warn_of_cache
from opjit.store import inventory
from opjit.store.inventory import EntryInfo
from opjit.store.store import DAY, PARTS, SPECIAL, Store

SIZE = 10 << 30  # bytes; the default of OPJIT_CACHE_SIZE
AGE = 90 * DAY
_FRESH = 3600.0  # seconds; also the tolerance for dates in the future
_THREADS = 8  # that remove: a filesystem lets a folder's removal wait for its journal; 3,000 took 17 s one by one, and 1.4 s so
MARKER = "pruned"  # a file in the store; its date is the date of the last pruning after a build
_SIZE = r"(\d{1,19}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)(b?)"
_AGE = r"(\d{1,15}(?:\.\d{1,15})?)\s*([smhdw]?)"
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": DAY, "d": DAY, "w": 7 * DAY}


class Cleared(NamedTuple):
    """The result of `clear`.

    Attributes:
        removed: the number of removed entries.
        freed: their bytes.
        failed: the number of entries that could not be removed.
    """

    removed: int
    freed: int
    failed: int


class Pruned(NamedTuple):
    """The result of `prune`.

    Attributes:
        removed: the number of removed entries.
        freed: their bytes.
        kept: the number of entries that stay.
        size: their bytes.
        failed: the number of entries that could not be removed.
        fresh: the number of entries that stay because they are less than an hour old.
    """

    removed: int
    freed: int
    kept: int
    size: int
    failed: int
    fresh: int


def clear(store: Store, ops: Sequence[str] = ()) -> Cleared:
    """Remove the entries of some ops, or everything including compiler notes and logs; see
    `opjit.cache.clear`.
    """
    items = list(inventory.scan(store))
    if ops:
        wanted = {op if "::" in op else f"opjit::{op}" for op in ops}
        for op in sorted(wanted - {item.op for item in items}):
            raise BadSetting(
                f"the cache does not contain an entry of {op}; `opjit cache ls` lists its entries"
            )
        items = [item for item in items if item.op in wanted]
    if not os.path.isdir(store.base):
        return Cleared(0, 0, 0)
    staging = _staging(store)
    gone = _remove(items, staging)
    if not ops:
        _sweep(store, staging)
    return Cleared(len(gone), sum(item.size for item in gone), len(items) - len(gone))


def prune(store: Store, size: int, age: float = AGE) -> Pruned:
    """Remove entries unused for `age` seconds, then the least recently used until at most `size` bytes are left: parts first."""
    if not os.path.isdir(store.base):
        return Pruned(0, 0, 0, 0, 0, 0)
    staging = _staging(store)
    now = time.time()
    items = [
        *inventory.parts(store),
        *sorted(inventory.scan(store), key=lambda item: _used(item, now)),
    ]
    total = left = sum(item.size for item in items)
    chosen = []
    fresh = 0
    for item in items:
        if not (age and _used(item, now) < now - age) and not (size and left > size):
            continue
        if abs(now - item.published) < _FRESH:
            fresh += item.op != PARTS
        else:
            chosen.append(item)
            left -= item.size
    gone = _remove(chosen, staging)
    if age:  # a build in progress may need a file that was used within the last hour
        _sweep(store, staging, now - max(age, _FRESH))
    freed = sum(item.size for item in gone)
    removed, entries = (sum(item.op != PARTS for item in some) for some in (gone, items))
    return Pruned(removed, freed, entries - removed, total - freed, len(chosen) - len(gone), fresh)


def _used(item: EntryInfo, now: float) -> float:
    """An entry's last use. Dates in the future are ignored: then it is the date of publication, or 0 if that is in the future too."""
    return max(
        (date for date in (item.read, item.written) if date <= now + _FRESH),
        default=item.published if item.published <= now + _FRESH else 0.0,
    )


def _staging(store: Store) -> Path:
    """Return the folder in which files are deleted. Raises OpjitError if it is not writable, or other users could replace the store."""
    try:
        folder = store.staging()
    except (OSError, UntrustedFolder) as error:
        raise OpjitError(f"nothing can be removed from the cache {store.root}: {error}") from error
    if not os.access(folder, os.W_OK):
        raise OpjitError(
            f"nothing can be removed from the cache {store.root}: you cannot write to it"
        )
    return folder


def _remove(items: Sequence[EntryInfo], staging: Path) -> list[EntryInfo]:
    """Remove entries, and the folders of archs and ops in which none is left.

    Returns the removed entries.
    """
    folders = [item.folder for item in items]
    removed = processes.in_parallel(partial(_take, staging=staging), folders, _THREADS)
    gone = [item for item, is_gone in zip(items, removed, strict=True) if is_gone]
    for folder in {
        item.folder.parent for item in gone
    }:  # each once, because rmdir reads a folder that had many entries to its end
        with suppress(OSError):
            os.rmdir(folder)
            os.rmdir(folder.parent)
    return gone


def _take(path: Path, staging: Path) -> bool:
    """Remove a file or folder. Returns False if it is still there."""
    aside = staging / files.random_name()
    try:
        os.rename(path, aside)
    except OSError:
        return not os.path.lexists(path)
    files.remove_tree(aside)
    return not os.path.lexists(aside)


def _sweep(store: Store, staging: Path, before: float | None = None) -> None:
    """Remove notes, logs and parts last used before a time; for None all but the parts, with which a build may be linking."""
    for kind in SPECIAL - {"staging"} - ({PARTS} if before is None else set()):
        with suppress(OSError), os.scandir(store.base / kind) as found:
            for entry in found:
                if before is None or _last_use(entry) < before:
                    _take(Path(entry.path), staging)


def _last_use(entry: os.DirEntry[str]) -> float:
    try:
        status = entry.stat(follow_symlinks=False)
        if not entry.is_dir(follow_symlinks=False):
            return max(status.st_atime, status.st_mtime)
        with os.scandir(entry.path) as found:
            return max([status.st_mtime, *(_last_use(file) for file in found)])
    except OSError:
        return 0.0


def parse_size(size: int | str) -> int:
    """Return a size in bytes: an integer, or ``"5GiB"``, ``"5G"`` (the same), ``"5GB"`` (powers of 1000),
    ``"0"``. Raises BadSetting for any other text or a negative number.
    """
    found = _matched(_SIZE, str(size), "a size such as 5GiB, 500MB or 0 for no bound")
    unit = 1000 if found[4] and found[2] and not found[3] else 1024
    return int(float(found[1]) * unit ** " kmgt".index(found[2].lower() or " "))


def parse_age(age: float | str) -> float:
    """Return an age in seconds: a number, or ``"30d"``, ``"12h"``, ``"2w"``; in a text, a plain number
    means days. Raises BadSetting for any other text or a negative number.
    """
    text = age if isinstance(age, str) else f"{age:f}s"
    found = _matched(_AGE, text, "an age such as 30d, 12h, 2w or 0 for no bound")
    return float(found[1]) * _SECONDS[found[2].lower()]


def _matched(pattern: str, text: str, expected: str) -> re.Match[str]:
    found = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
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


def after_build(store: Store) -> None:
    """Prune the store unless a build did so within a day; the first in a new store only sets the date. A failure is no error."""
    marker = store.base / MARKER
    try:
        is_new = not os.path.lexists(marker)
        if not is_new and abs(time.time() - os.lstat(marker).st_mtime) < DAY:
            return
        files.write_note(marker, "")  # first, so that few of many processes prune
        if is_new:
            return
        done = prune(store, size_wanted())
        if done.failed:
            warn_of_cache(
                f"{done.failed} old entries of the cache {store.root} could not be removed; check "
                "their permissions and run `opjit cache prune`"
            )
    except BadSetting as error:
        warn_of_cache(f"the cache was not pruned: {error}")
    except (OSError, OpjitError):
        pass

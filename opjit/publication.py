"""From what a build leaves to an entry: in the store, or else in a folder that goes with the process."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from opjit import counters, files, progress
from opjit.errors import BuildError, CacheWarning, CompileError, EntryError, UntrustedFolder
from opjit.manifest import Manifest
from opjit.store import Entry, Store, default_root, verify
from opjit.targets import Target

MARKER = "pruned"  # in the store; its date is when a build pruned it last
_INTERVAL = 24 * 3600.0  # seconds
_SLACK = 3600.0  # by which a date may lie ahead


class Work(NamedTuple):
    """A build that somebody asked for.

    Attributes:
        name: what is built, for messages.
        target: of an op; None for a C++ extension.
        make: leaves a complete entry in the folder "entry" of a staging folder; the second folder is for what builds share.
        place: the folder of its entry in the store.
        fault: makes an error from a sentence.
        unread: which of its inputs cannot be read, so that no key can stand for what it makes; None where all can.
        kept: it is done for the store, and of no use without that.
    """

    name: str
    target: Target | None
    make: Callable[[Path, Path], Manifest]
    place: Callable[[Manifest], Path]
    fault: Callable[[str], BuildError]
    unread: str | None = None
    kept: bool = False


def publish(work: Work, store: Store) -> Entry:
    """Do the work and publish what it makes; where the store cannot be written, keep it for this process only.

    Raises:
        BuildError: it cannot be built, or nowhere.
    """
    if work.unread:
        return _privately(work, store, EntryError(f"{work.unread}, and no key can stand for it"))
    try:
        staged = store.stage()
    except (OSError, EntryError) as error:
        return _privately(work, store, error)
    try:
        described = work.make(staged, store.base)
        counters.built(store.base, described.size)
        progress.step("publishing")
        entry = store.put(staged / "entry", work.place(described), described, work.target)
    except (OSError, EntryError) as error:
        return _privately(work, store, error)
    except CompileError as error:
        if staged.is_dir():
            raise
        return _privately(work, store, error)  # the compilers' files were removed under them, with the whole cache
    finally:
        files.remove_tree(staged)
    if store.root == default_root():  # a store made for others is kept whole
        _prune_daily(store, entry)
    return entry


def _prune_daily(store: Store, published: Entry) -> None:
    """Prune the store if the last build that did so did it a day ago or more, or if its date makes no sense.

    In a new store nothing is old: its first build only leaves the date.
    """
    marker = store.base / MARKER
    try:
        now = os.stat(published.folder).st_ctime  # the filesystem's own clock
        if not os.path.lexists(marker):
            files.write_note(marker, "")
            return
        last = os.lstat(marker)
    except OSError:
        return
    if not (stat.S_ISREG(last.st_mode) and -_SLACK <= now - last.st_mtime < _INTERVAL):
        from opjit import prune

        prune.after_build(store)


def _privately(work: Work, store: Store, reason: Exception) -> Entry:
    """It works even where nothing can be kept: from a folder that goes with the process."""
    if work.kept and work.unread:
        raise work.fault(f"{reason}; make it readable") from reason
    if work.kept:
        raise work.fault(f"the store {store.root} cannot keep it: {reason}; make room there or name another store") from reason
    if isinstance(reason, UntrustedFolder):
        store.tell(str(reason))
    else:
        advice = "make it readable" if work.unread else "set OPJIT_CACHE to a folder of your own"
        warnings.warn(CacheWarning(f"the cache cannot be used, so {work.name} is built for this process only: {reason}; {advice}"),
                      stacklevel=2)
    try:
        folder = files.until_exit()
        described = work.make(folder, folder)
        counters.built(store.base, described.size)
        place = folder / described.key
        os.rename(folder / "entry", place)
        return verify(place, work.target)[0]
    except (OSError, EntryError) as error:
        raise work.fault(f"nor can it be built in a temporary folder: {error}; set OPJIT_CACHE or TMPDIR to a folder that you can "
                         "write") from error

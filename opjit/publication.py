"""From what a build leaves to an entry: in the store, or else in a folder that goes with the process."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from opjit import files
from opjit.errors import BuildError, CacheWarning, EntryError
from opjit.manifest import Manifest
from opjit.store import Entry, Store, verify
from opjit.targets import Target


class Work(NamedTuple):
    """A build that somebody asked for.

    Attributes:
        name: what is built, for messages.
        target: of an op; None for a C++ extension.
        make: leaves a complete entry in the folder "entry" of a staging folder; the second folder is for what builds share.
        place: the folder of its entry in the store.
        fault: makes an error from a sentence.
    """

    name: str
    target: Target | None
    make: Callable[[Path, Path], Manifest]
    place: Callable[[Manifest], Path]
    fault: Callable[[str], BuildError]


def publish(work: Work, store: Store) -> Entry:
    """Do the work and publish what it makes; where the store cannot be written, keep it for this process only.

    Raises:
        BuildError: it cannot be built, or nowhere.
    """
    try:
        staged = store.stage()
    except (OSError, EntryError) as error:
        return _privately(work, error)
    try:
        described = work.make(staged, store.base)
        return store.put(staged / "entry", work.place(described), described, work.target)
    except (OSError, EntryError) as error:
        return _privately(work, error)
    finally:
        files.remove_tree(staged)


def _privately(work: Work, reason: Exception) -> Entry:
    """It works even where nothing can be kept: from a folder that goes with the process."""
    warnings.warn(CacheWarning(f"the cache cannot be used, so {work.name} is built for this process only: {reason}. Set OPJIT_CACHE to a "
                               "folder of your own"), stacklevel=2)
    try:
        folder = files.until_exit()
        described = work.make(folder, folder)
        place = folder / described.key
        os.rename(folder / "entry", place)
        return verify(place, work.target)[0]
    except (OSError, EntryError) as error:
        raise work.fault(f"nor can it be built in {tempfile.gettempdir()}: {error}") from error

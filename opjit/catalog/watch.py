"""Reloads ops when their files are saved.

A thread compares the files' dates, because a check during calls would slow down every call.
"""

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opjit import backends, files
from opjit.catalog import registry, reload
from opjit.errors import OpjitError
from opjit.files import StrPath
from opjit.operators.op import Op
from opjit.recipe.recipe import Recipe
from opjit.store import layers
from opjit.store.entry import read
from opjit.store.store import default_store
from opjit.wanted import describe, here

INTERVAL = 0.2  # seconds between two checks
logger = logging.getLogger("opjit")

_Stamps = dict[str, tuple[int, ...] | None]


@dataclass
class _Seen:
    """The state of an op's files at the last check."""

    keys: list[str] | None = None  # of its loaded kernels
    read_by_builds: list[str] = field(default_factory=list)
    stamps: _Stamps = field(default_factory=dict)  # that the op is up to date with
    changing: _Stamps | None = None


class FolderWatch(AbstractContextManager["FolderWatch"]):
    """A watched folder.

    `stop` or the end of a ``with`` block ends the watch.
    """

    def __init__(self, ops: Iterable[Op], interval: float) -> None:
        self._declarations = {op.declaration.file for op in ops}
        self._interval = interval
        self._stopped = threading.Event()
        self._seen = defaultdict[str, _Seen](_Seen)
        for op in self._ops():
            _is_saved(op, self._seen[op.qualified])
        self._thread = threading.Thread(target=self._run, name="opjit.watch", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the watch, after a reload in progress."""
        self._stopped.set()
        self._thread.join()

    def _ops(self) -> list[Op]:
        return [op for op in registry.all_ops() if op.declaration.file in self._declarations]

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            for op in self._ops():
                if not _is_saved(op, self._seen[op.qualified]):
                    continue
                try:
                    reload.refresh(op)
                    logger.info("%s is up to date with its files", op.qualified)
                except Exception as error:  # op.py may raise anything
                    trace = not isinstance(error, OpjitError)
                    logger.error("%s stays as it was: %s", op.qualified, error, exc_info=trace)


def _is_saved(op: Op, seen: _Seen) -> bool:
    """Return whether files changed, and two checks agree, because a file may be half saved."""
    keys = [loaded.key for loaded in op.loaded.values()]
    is_new = keys != seen.keys
    is_stale = False
    if is_new:
        builds = list(_builds(op))
        paths = [recipe.places.path(name) for recipe, read in builds for name in read["inputs"]]
        seen.keys = keys
        seen.read_by_builds = [path for path in paths if path]
        is_stale = any(any(recipe.changes(document)) for recipe, document in builds)
    now = {path: files.stat_signature(path) for path in (*_files(op), *seen.read_by_builds)}
    if is_new:  # a file that a build read now counts, and is no change
        before = seen.stamps
        seen.stamps = {} if is_stale else {path: before.get(path, now[path]) for path in now}
    is_same = now == seen.stamps
    is_saved = not is_same and now == seen.changing
    seen.changing = None if is_same else now
    if is_saved:
        seen.stamps = now
    return is_saved


def _files(op: Op) -> Iterator[str]:
    """Yield the files in an op's folder and in its folders of headers."""
    extra = op.declaration.flags_of_author
    for folder in (str(op.folder), *(extra.include if extra else ())):
        with suppress(OSError), os.scandir(folder) as entries:
            yield from (each.path for each in entries if each.is_file() and each.name[0] != ".")


def _builds(op: Op) -> Iterator[tuple[Recipe, dict[str, Any]]]:
    """Yield the recipe of each loaded kernel, and the document of the build that made it."""
    for name, loaded in list(op.loaded.items()):
        with suppress(OpjitError, OSError):
            recipe = describe(op, here(backends.for_device(name)), default_store())
            folder = Path(recipe.place_of_entries).parent
            for place in layers.locations(recipe, default_store()):
                for each in (place.store.base / folder).glob(f"*/{loaded.key}"):
                    yield recipe, read(each, place.source)[0].document


def watch(folder: StrPath, interval: float = INTERVAL) -> FolderWatch:
    """Declare the ops of a directory like `opjit.add_path`, and reload an op when you save one of its files.

    Each reload is an ``opjit.reload(name)``, in a background thread. It rebuilds an op for the devices on which it was used, while
    the program continues. After an error, the op keeps its old code, and the logger ``opjit`` reports the error, by default to stderr.

    Args:
        folder: an op directory, or a directory that contains op directories.
        interval: seconds between two checks of the files.

    Raises:
        DeclarationError: the directory does not contain an op.

    Example:
        >>> with opjit.watch("my_ops"):
        ...     train()
    """
    return FolderWatch(registry.add_path(folder), interval)

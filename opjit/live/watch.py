"""Reloads ops when their files are saved.

A thread compares the files' dates, because a check during calls would slow down every call.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from opjit import backends, files
from opjit.catalog import registry
from opjit.errors import OpjitError
from opjit.files import StrPath
from opjit.live import reload
from opjit.operators.op import Op
from opjit.recipe.recipe import Recipe
from opjit.store import layers
from opjit.store.entry import read
from opjit.store.store import default_store
from opjit.wanted import describe, here

INTERVAL = 0.2  # seconds between two checks
logger = logging.getLogger("opjit")

_Stamps = dict[str, tuple[int, ...] | None]


class FolderWatch(AbstractContextManager["FolderWatch"]):
    """A watched folder.

    `stop` or the end of a ``with`` block ends the watch.
    """

    def __init__(self, ops: Iterable[Op], interval: float) -> None:
        self._declarations = {op.declaration.file for op in ops}
        self._interval = interval
        self._stopped = threading.Event()
        self._headers: dict[str, tuple[list[str] | None, list[str]]] = {}
        self._last: dict[str, _Stamps] = {}
        self._last = {op.qualified: self._stamps(op) for op in self._ops()}
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
        changing: dict[str, _Stamps] = {}
        while not self._stopped.wait(self._interval):
            for op in self._ops():
                now = self._stamps(op)
                if now == self._last.get(op.qualified):
                    changing.pop(op.qualified, None)
                elif changing.get(op.qualified) != now:
                    changing[op.qualified] = (
                        now  # wait until two checks agree, because a file may be half saved
                    )
                else:
                    self._headers.pop(op.qualified, None)
                    self._last[op.qualified] = self._stamps(op)
                    try:
                        reload.refresh(op)
                    except Exception as error:  # op.py may raise anything; logged once for each time that files are saved
                        logger.error(
                            "%s stays as it was: %s",
                            op.qualified,
                            error,
                            exc_info=not isinstance(error, OpjitError),
                        )
                    else:
                        logger.info("%s is up to date with its files", op.qualified)

    def _stamps(self, op: Op) -> _Stamps:
        """Return the stamps of the files in an op's folder and in its folders of headers, and of the files that its builds read."""
        extra = op.declaration.flags_of_author
        names = []
        for folder in (str(op.folder), *(extra.include if extra else ())):
            with suppress(OSError), os.scandir(folder) as entries:
                names += [
                    entry.path
                    for entry in entries
                    if entry.is_file() and not entry.name.startswith(".")
                ]
        before = self._headers.get(op.qualified)
        now = {path: files.stat_signature(path) for path in (*names, *self._read_by_builds(op))}
        last = self._last.get(op.qualified, {})
        # A file that comes into view is no change, if it is as the build read it.
        if before is not self._headers[op.qualified] and self._last.get(op.qualified):
            self._last[op.qualified] = {path: last.get(path, now[path]) for path in now}
        return now

    def _read_by_builds(self, op: Op) -> list[str]:
        """Return the files that the builds of an op's loaded kernels read."""
        keys = [loaded.key for loaded in op.loaded.values()]
        known, found = self._headers.get(op.qualified, (None, []))
        if keys != known:
            found = []
            for name in op.loaded:
                with suppress(OpjitError, OSError):
                    target = here(backends.for_device(name))
                    found += self._read_by_build(op, describe(op, target, default_store()))
            self._headers[op.qualified] = keys, found
        return found

    def _read_by_build(self, op: Op, recipe: Recipe) -> Iterator[str]:
        """Yield the files that the build of a loaded kernel read. If one has changed since then, the op is out of date."""
        key = op.loaded[recipe.target.backend.name].key
        name = Path(recipe.place_of_entries).parent
        for place in layers.locations(recipe, default_store()):
            for folder in (place.store.base / name).glob(f"*/{key}"):
                document = read(folder, place.source)[0].document
                if any(recipe.changes(document)):
                    self._last[op.qualified] = {}
                yield from filter(None, map(recipe.places.path, document["inputs"]))


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

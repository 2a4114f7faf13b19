"""Reload ops as their files are saved.

A thread looks at the files' dates. A call of an op goes from torch straight to C, so there is no place in it that could look
without costing every call something.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from opjit import backends, catalog, files, headers, reload, resources
from opjit.errors import NoKernel, OpjitError
from opjit.op import Op

INTERVAL = 0.2  # seconds between two looks
logger = logging.getLogger("opjit")

_Look = dict[str, tuple[int, ...] | None]


class Watch:
    """A folder under watch, until `stop` is called, or the block is left that it opens as a context manager."""

    def __init__(self, ops: Iterable[Op], interval: float) -> None:
        self._declarations = {op.file for op in ops}
        self._interval = interval
        self._stopped = threading.Event()
        self._included: dict[str, list[str]] = {}
        self._seen = {op.qualified: self._look(op) for op in self._ops()}
        self._thread = threading.Thread(target=self._run, name="opjit.watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Watch no longer; a reload under way is waited for."""
        self._stopped.set()
        self._thread.join()

    def _ops(self) -> list[Op]:
        return [op for op in catalog.all_ops() if op.file in self._declarations]

    def _run(self) -> None:
        waiting: dict[str, _Look] = {}
        while not self._stopped.wait(self._interval):
            for op in self._ops():
                now = self._look(op)
                if now == self._seen.get(op.qualified):
                    waiting.pop(op.qualified, None)
                elif waiting.get(op.qualified) != now:
                    waiting[op.qualified] = now  # somebody is saving: wait until two looks see the same
                else:
                    self._included.pop(op.qualified, None)
                    self._seen[op.qualified] = self._look(op)
                    _reload(op)

    def _look(self, op: Op) -> _Look:
        """The stamps of the files in an op's folder, and of those that its sources included when they were last read."""
        if op.qualified not in self._included:
            self._included[op.qualified] = _included(op)
        names: list[str] = []
        with suppress(OSError), os.scandir(op.folder) as entries:
            names = [entry.path for entry in entries if entry.is_file() and not entry.name.startswith(".")]
        return {path: files.stamp(path) for path in (*names, *self._included[op.qualified])}


def _included(op: Op) -> list[str]:
    include = (str(op.folder), *(op.extra.include if op.extra else ()), str(resources.folder("kernels_c")))
    found: list[str] = []
    for backend in backends.all_backends():
        with suppress(NoKernel, OSError):
            found += headers.closure([str(op.source(backend))], include)
    return found


def _reload(op: Op) -> None:
    """Bring an op up to date; what is wrong with its new files is said, once for each time they are saved."""
    try:
        reload.refresh(op)
        logger.info("%s is up to date with its files", op.qualified)
    except OpjitError as error:
        logger.error("%s stays as it was: %s", op.qualified, error)
    except Exception:  # op.py is anybody's code
        logger.exception("%s stays as it was: its op.py raised", op.qualified)


def watch(folder: str | os.PathLike[str], interval: float = INTERVAL) -> Watch:
    """Reload the ops of a folder whenever their files are saved; the folder is added as `opjit.add_path` does.

    A reload is that of ``opjit.get(name, reload=True)``: for the devices that an op was used on, while the program runs on. When
    the new files are wrong, the log of ``opjit`` says so, which is on stderr unless the program sets logging up, and the op stays
    as it was until they are saved again.

    Args:
        folder: an op's folder, or a folder of such folders.
        interval: seconds between two looks at the files' dates, from a thread of its own.

    Example:
        >>> with opjit.watch("my_ops"):
        ...     train()
    """
    return Watch(catalog.add_path(folder), interval)

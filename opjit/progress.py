"""What a person sees of a request: a line at a terminal while a build runs, and each request's way in the log.

The logger ``opjit`` tells at INFO where each op was found, why it was not, how long its build took and where that went, and at DEBUG
the commands. OPJIT_VERBOSE=1 prints the INFO lines to stderr, for who has not set up logging. A pipe or a log file sees nothing
unless it asks for it, but for what takes LONG: that is a warning, so that nobody looks at a program that hangs without knowing where.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from opjit import commands
from opjit.environment import is_on

if TYPE_CHECKING:
    from opjit.store import Entry

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_stepping: ContextVar[Callable[[str], None] | None] = ContextVar("stepping", default=None)
logger = logging.getLogger("opjit")
LONG = 60.0  # seconds, after which even those are told who asked for nothing


def told(listener: Callable[[str], None]) -> AbstractContextManager[None]:
    """While the block runs, tell `listener` each line instead."""
    return _set(_listener, listener)


def stepping(listener: Callable[[str], None]) -> AbstractContextManager[None]:
    """While the block runs, tell `listener` each step of the build in it."""
    return _set(_stepping, listener)


@contextmanager
def _set(variable: ContextVar[Callable[[str], None] | None], listener: Callable[[str], None]) -> Iterator[None]:
    before = variable.set(listener)
    try:
        yield
    finally:
        variable.reset(before)


def step(name: str) -> None:
    """What a build does now, in one word: ``"compiling"``, ``"checking"``, ``"publishing"``. Other processes may wait for it."""
    listener = _stepping.get()
    if listener is not None:
        listener(name)


def heard() -> bool:
    """Whether anybody would see what `say` is told."""
    return is_on("OPJIT_VERBOSE") or logger.isEnabledFor(logging.INFO)


def say(message: str) -> None:
    """A line about a request, for the log, and for stderr where OPJIT_VERBOSE asks for it."""
    logger.info(message)
    if is_on("OPJIT_VERBOSE") and is_open(sys.stderr):
        print(f"opjit: {message}", file=sys.stderr)


def is_open(stream: object) -> bool:
    """Whether sys.stdout or sys.stderr can be written to: a process may be started without them, or close them."""
    return stream is not None and not getattr(stream, "closed", False)


def timed(what: str, build: Callable[[], Entry]) -> Entry:
    """Build, and say how long that took and where the binary went."""
    started = time.perf_counter()
    entry = build()
    say(f"built {what} in {time.perf_counter() - started:.2f} s: {entry.folder}")
    return entry


def log_commands(work: Path, ninja: str) -> None:
    """Tell the log the commands of a build, also of one that failed; costs a process, and that only at DEBUG."""
    if logger.isEnabledFor(logging.DEBUG) and (work / "build.ninja").is_file():
        done = commands.run([os.path.join(ninja, "ninja"), "-t", "commands"], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, errors="replace")
        for command in done.stdout.splitlines():
            logger.debug(command)


@contextmanager
def shown(message: str) -> Iterator[Callable[[str], None]]:
    """Show a line while the block runs; yields a function that changes it."""
    listener = _listener.get()
    if listener is not None:
        logger.info(message)
        listener(message)
        yield listener
        return
    say(message)
    if not is_on("OPJIT_VERBOSE") and is_open(sys.stderr) and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(message) as status, _reminding(message, status.update) as change:
            yield change
    else:
        with _reminding(message, say) as change:
            yield change


@contextmanager
def _reminding(now: str, show: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Warn of what goes on when the block has taken LONG; yields a function that shows what else goes on, and then warns of that."""

    def change(text: str) -> None:
        nonlocal now
        now = text
        show(text)

    timer = threading.Timer(LONG, lambda: logger.warning("%.0f s, and process %d is still %s", LONG, os.getpid(), now))
    timer.daemon = True
    with suppress(RuntimeError):  # the process may have no more threads
        timer.start()
    try:
        yield change
    finally:
        timer.cancel()

"""What a user sees of a request: a status line on a terminal during a build, and log records.

The logger ``opjit`` records at INFO where each op was found, why it was not, how long its build took and where the entry lies; at DEBUG,
the compilers' commands. OPJIT_VERBOSE=1 prints INFO lines to stderr for programs that have not configured logging. A build or a wait that
takes LONG is logged as a warning, so that no program seems to hang without a reason.

Many builds share one live display on a terminal. Elsewhere, each gets a line when it ends or takes LONG.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

from opjit.environment import is_on

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


_status_listener: ContextVar[Callable[[str], None] | None] = ContextVar("status_listener", default=None)
_step_listener: ContextVar[Callable[[str], None] | None] = ContextVar("step_listener", default=None)
logger = logging.getLogger("opjit")
LONG = 60.0  # seconds until a warning


def on_status(listener: Callable[[str], None]) -> AbstractContextManager[None]:
    """Pass status lines to `listener` during the block, instead of showing them."""
    return _set(_status_listener, listener)


def on_step(listener: Callable[[str], None]) -> AbstractContextManager[None]:
    """Pass each step of the block's build to `listener`."""
    return _set(_step_listener, listener)


@contextmanager
def _set(variable: ContextVar[Callable[[str], None] | None], listener: Callable[[str], None]) -> Iterator[None]:
    before = variable.set(listener)
    try:
        yield
    finally:
        variable.reset(before)


def step(name: str) -> None:
    """Report a build's step, which waiting processes show: ``"compiling"``, ``"checking"`` or ``"publishing"``."""
    listener = _step_listener.get()
    if listener is not None:
        listener(name)


def is_logged() -> bool:
    """Tell whether `log` writes anywhere."""
    return is_on("OPJIT_VERBOSE") or logger.isEnabledFor(logging.INFO)


def log(message: str) -> None:
    """Log a line about a request, and print it to stderr under OPJIT_VERBOSE."""
    logger.info(message)
    if is_on("OPJIT_VERBOSE") and is_open(sys.stderr):
        print(f"opjit: {message}", file=sys.stderr)


def is_open(stream: object) -> bool:
    """Tell whether sys.stdout or sys.stderr is usable: a process may have started without it, or closed it."""
    return stream is not None and not getattr(stream, "closed", False)


@contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """Show a status line during the block. Yields a function that changes it."""
    listener = _status_listener.get()
    if listener is not None:
        logger.info(message)
        listener(message)
        yield listener
        return
    log(message)
    if not is_on("OPJIT_VERBOSE") and is_open(sys.stderr) and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(message) as spinner, _warning_when_long(message, spinner.update) as change:
            yield change
    else:
        with _warning_when_long(message, log) as change:
            yield change


@contextmanager
def _warning_when_long(now: str, show: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Warn once, with the current status line, when the block has taken LONG. Yields a function that shows and changes that line."""

    def change(text: str) -> None:
        nonlocal now
        now = text
        show(text)

    timer = threading.Timer(LONG, lambda: logger.warning("%.0f s, and process %d is still %s", LONG, os.getpid(), now))
    timer.daemon = True
    with suppress(RuntimeError):  # the system refuses another thread
        timer.start()
    try:
        yield change
    finally:
        timer.cancel()


def ago(seconds: float) -> str:
    """Say how long ago, in one unit, such as ``"3 min ago"``."""
    if seconds < -60:
        return "in the future"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


class Display:
    """Shows many builds. This one writes a line when a build ends or takes LONG."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._begun: dict[int, tuple[float, str]] = {}  # start and last status of running builds, until reported as long

    def started(self, number: int, name: str) -> None:
        """A build began."""
        self._begun[number] = time.monotonic(), f"building {name}"

    def changed(self, number: int, text: str) -> None:
        """A build's status changed: it waits, or has reached another step."""
        if number in self._begun:
            self._begun[number] = self._begun[number][0], text

    def ended(self, number: int, name: str, state: str, seconds: float) -> None:
        """A build ended: "built", "there" or "failed"."""
        self._begun.pop(number, None)
        self._write(f"{'already there' if state == 'there' else state}: {name}, {seconds:.1f} s")

    def tick(self) -> None:
        """Time has passed."""
        for number, (since, text) in list(self._begun.items()):
            if time.monotonic() - since > LONG:
                del self._begun[number]
                self._write(f"{LONG:.0f} s, and still {text}")


@contextmanager
def plain(write: Callable[[str], object]) -> Iterator[Display]:
    """Open a display that writes lines to a pipe, a log file or a logger."""
    yield Display(write)


@contextmanager
def live(stream: TextIO, names: Sequence[str]) -> Iterator[Display]:
    """Open a live display on a terminal, for builds of these names: running and failed ones, and how many are done."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    columns = SpinnerColumn(finished_text="✗"), TextColumn("{task.description}", markup=False)
    # No refresh thread: it could hold the console's lock during a fork.
    with Progress(*columns, console=Console(file=stream), auto_refresh=False, transient=True) as bars:
        yield _LiveDisplay(bars, len(names))


class _LiveDisplay(Display):
    def __init__(self, bars: Progress, count: int) -> None:
        super().__init__(lambda text: None)
        self._bars, self._count, self._done, self._failed = bars, count, 0, 0
        self._total = bars.add_task("")
        self._tasks: dict[int, tuple[TaskID, str]] = {}

    def started(self, number: int, name: str) -> None:
        super().started(number, name)
        self._tasks[number] = self._bars.add_task(name), name
        self.tick()

    def changed(self, number: int, text: str) -> None:
        super().changed(number, text)
        self.tick()

    def ended(self, number: int, name: str, state: str, seconds: float) -> None:
        del self._begun[number]
        task, _ = self._tasks[number]
        self._done += 1
        if state == "failed":
            self._failed += 1
            self._bars.update(task, total=1, completed=1, description=f"{name}  failed, {seconds:.1f} s")
        else:
            self._bars.remove_task(task)
        self.tick()

    def tick(self) -> None:
        for number, (since, text) in self._begun.items():
            task, name = self._tasks[number]
            state = text if text.startswith("waiting") else f"building, {time.monotonic() - since:.0f} s"
            self._bars.update(task, description=f"{name}  {state}")
        waiting = self._count - self._done - len(self._begun)
        self._bars.update(self._total, description=f"{self._done} of {self._count} done, {waiting} waiting, {self._failed} failed")
        self._bars.refresh()

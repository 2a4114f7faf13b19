"""The progress of a request: a status line on a terminal, records of the logger ``opjit``, and a warning after LONG seconds. Many
builds share one live display on a terminal; elsewhere, each gets a line when it ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

from opjit.environment import is_on

if TYPE_CHECKING:
    import logging

    from rich.progress import Progress, TaskID


_Listener = ContextVar[Callable[[str], None] | None]
STATUS: _Listener = ContextVar("status_listener", default=None)
STEP: _Listener = ContextVar("step_listener", default=None)
LONG = 60.0  # seconds until a warning


def logger() -> logging.Logger:
    import logging  # imported late: a hit doesn't need it, and it costs 7 of 50 ms (tests/benchmarks/builders.py imports)

    return logging.getLogger("opjit")


@contextmanager
def on(event: _Listener, listener: Callable[[str], None]) -> Iterator[None]:
    """Pass status lines, instead of showing them, or each STEP of a build to `listener` during the block."""
    before = event.set(listener)
    try:
        yield
    finally:
        event.reset(before)


def step(name: str) -> None:
    """Report a build's step, which waiting processes show: ``"compiling"``, ``"checking"`` or ``"publishing"``."""
    listener = STEP.get()
    if listener is not None:
        listener(name)


def is_logged() -> bool:
    # logging.INFO.
    return is_on("OPJIT_VERBOSE") or ("logging" in sys.modules and logger().isEnabledFor(20))


def log(message: str) -> None:
    """Log a line about a request, and print it to stderr under OPJIT_VERBOSE."""
    if "logging" in sys.modules:  # else nobody reads it
        logger().info(message)
    if is_on("OPJIT_VERBOSE") and is_open(sys.stderr):
        print(f"opjit: {message}", file=sys.stderr)


def is_open(stream: object) -> bool:
    """Tell whether sys.stdout or sys.stderr is usable: a process may have started without it, or closed it."""
    return stream is not None and not getattr(stream, "closed", False)


@contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """Show a status line during the block, and warn once with it when that has taken LONG. Yields a function that changes the line."""
    show = STATUS.get() or log
    now = message
    if show is not log:
        logger().info(message)
    show(message)

    def change(text: str) -> None:
        nonlocal now
        now = text
        show(text)

    timer = threading.Timer(
        LONG, lambda: logger().warning("%.0f s, and process %d is still %s", LONG, os.getpid(), now)
    )
    timer.daemon = True
    with suppress(RuntimeError):  # the system refuses another thread
        timer.start()
    with ExitStack() as stack:
        stack.callback(timer.cancel)
        if (
            show is log
            and not is_on("OPJIT_VERBOSE")
            and is_open(sys.stderr)
            and sys.stderr.isatty()
        ):
            from rich.console import Console

            show = stack.enter_context(Console(stderr=True).status(message)).update
        yield change


def ago(seconds: float) -> str:
    """Say how long ago, in one unit, such as ``"3 min ago"``."""
    if seconds < -60:
        return "in the future"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def tally(number: int, noun: str) -> str:
    """``"1 sample"``, ``"2 samples"``, ``"2 entries"``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def readable(text: str) -> str:
    """Return lines for people: 80 columns wide, with ``~`` for the home directory and 12 digits of a key.

    Only a word that is longer, for example a path, has a wider line.
    """
    import re  # imported late, because a cache hit doesn't need them
    from textwrap import wrap

    home = os.path.expanduser("~")
    text = re.sub(rf"(?<![\w/]){re.escape(home)}/", "~/", text)
    text = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", text)
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        parts = wrap(
            line, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += parts or [""]
    return "\n".join(lines)


class Display:
    """Shows builds that run side by side: in place on a terminal, elsewhere a line for each that ends. Threads may report to it."""

    def __init__(self, write: Callable[[str], object], count: int, screen: Progress) -> None:
        self._write = write
        self._count = count
        self._screen = screen
        self._done = 0
        self._running: dict[int, tuple[float, TaskID]] = {}  # start and line of each build
        self._head = screen.add_task(f"0 of {count} done", total=None)

    def changed(self, number: int, text: str) -> None:
        """A build began, waits, or has reached another step."""
        if number not in self._running:
            self._running[number] = time.monotonic(), self._screen.add_task(text, total=None)
        self._screen.update(self._running[number][1], description=text)

    def ended(self, number: int, name: str, state: str) -> None:
        """A build ended: "built", "already there" or "failed"."""
        since, line = self._running.pop(number)
        text = f"{state}: {name}, {time.monotonic() - since:.1f} s"
        self._done += 1
        self._screen.remove_task(line)
        self._screen.update(self._head, description=f"{self._done} of {self._count} done")
        if self._screen.disable:
            self._write(text)
        elif state == "failed":
            self._screen.console.print(text, markup=False)


@contextmanager
def display(stream: TextIO | None, write: Callable[[str], object], count: int) -> Iterator[Display]:
    """Open a display of builds: in place if `stream` is a terminal, otherwise one line per build through `write`."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    shown = stream is not None and stream.isatty()
    with Progress(
        *columns, console=Console(file=stream, quiet=not shown), transient=True, disable=not shown
    ) as screen:
        yield Display(write, count, screen)

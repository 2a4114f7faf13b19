"""What a person at a terminal sees while a build runs; a pipe or a log file sees nothing unless it asks for it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_stepping: ContextVar[Callable[[str], None] | None] = ContextVar("stepping", default=None)
logger = logging.getLogger("opjit")


@contextmanager
def told(listener: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, tell `listener` each line instead."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


@contextmanager
def stepping(listener: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, tell `listener` each step of the build in it."""
    before = _stepping.set(listener)
    try:
        yield
    finally:
        _stepping.reset(before)


def step(name: str) -> None:
    """What a build does now, in one word: ``"compiling"``, ``"checking"``, ``"publishing"``. Other processes may wait for it."""
    listener = _stepping.get()
    if listener is not None:
        listener(name)


@contextmanager
def shown(message: str) -> Iterator[Callable[[str], None]]:
    """Show a line while the block runs; yields a function that changes it. With OPJIT_VERBOSE=1 lines go to stderr plainly."""
    logger.info(message)
    listener = _listener.get()
    if listener is not None:
        listener(message)
        yield listener
    elif os.environ.get("OPJIT_VERBOSE", "0") not in ("", "0"):
        print(f"opjit: {message}", file=sys.stderr)

        def say(text: str) -> None:
            logger.info(text)
            print(f"opjit: {text}", file=sys.stderr)

        yield say
    elif sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(message) as status:
            yield status.update
    else:
        yield logger.info

"""Ends a command that builds when the system or a person asks for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from opjit import processes


@contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGHUP and SIGTERM, which job schedulers send, like Ctrl-C: end the compilers, and leave no partial results.

    This is for commands that build. Commands that run kernels keep the default, because Python cannot interrupt an endless loop in C.
    """
    received = signal.SIGINT

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        raise KeyboardInterrupt

    # nohup ignores SIGHUP.
    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    try:
        with processes.handling(heeded, interrupt):
            yield
    except KeyboardInterrupt:
        click.echo(
            f"interrupted by {received.name}; finished builds are kept, and the same command continues from there",
            err=True,
        )
        sys.exit(128 + received)

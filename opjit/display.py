"""What a person sees while many builds run: at a terminal one display that changes in place, elsewhere a line for each that ended, or
takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from opjit import progress

if TYPE_CHECKING:
    from rich.console import RenderableType

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Display:
    """Told what happens; this one shows as a line of text each end, and what takes long."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._begun: dict[int, tuple[float, str]] = {}  # since when, and what was said last; without those whose length was told

    def started(self, number: int, name: str) -> None:
        """A build began."""
        self._begun[number] = time.monotonic(), f"building {name}"

    def says(self, number: int, text: str) -> None:
        """It waits for something, or has come to another step."""
        if number in self._begun:
            self._begun[number] = self._begun[number][0], text

    def ended(self, number: int, name: str, state: str, seconds: float) -> None:
        """A build ended: "built", "there" or "failed"."""
        self._begun.pop(number, None)
        self._say(f"{'already there' if state == 'there' else state}: {name}, {seconds:.1f} s")

    def tick(self) -> None:
        """Time has passed."""
        for number, (since, text) in list(self._begun.items()):
            if time.monotonic() - since > progress.LONG:
                del self._begun[number]
                self._say(f"{progress.LONG:.0f} s, and still {text}")


@contextmanager
def plain(say: Callable[[str], object]) -> Iterator[Display]:
    """Lines for a pipe, a log file or a logger."""
    yield Display(say)


@contextmanager
def live(stream: TextIO, names: Sequence[str]) -> Iterator[Display]:
    """A display in place, on a terminal.

    Args:
        names: of all builds, in the order of their numbers.
    """
    from rich.console import Console
    from rich.live import Live

    # No thread draws beside the builds: a fork would leave the child with a console that somebody holds.
    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as drawn:
        yield _Live(names, drawn.console.height, lambda picture: drawn.update(picture, refresh=True))


class _Live(Display):
    def __init__(self, names: Sequence[str], height: int, draw: Callable[[RenderableType], None]) -> None:
        self._names = names
        self._room = max(3, height - 3)
        self._draw = draw
        self._begun: dict[int, tuple[float, str]] = {}
        self._over: dict[int, tuple[str, float]] = {}

    def started(self, number: int, name: str) -> None:
        self._begun[number] = time.monotonic(), ""
        self.tick()

    def says(self, number: int, text: str) -> None:
        self._begun[number] = self._begun[number][0], text
        self.tick()

    def ended(self, number: int, name: str, state: str, seconds: float) -> None:
        self._begun.pop(number, None)
        self._over[number] = state, seconds
        self.tick()

    def tick(self) -> None:
        self._draw(self._picture())

    def _picture(self) -> RenderableType:
        """What is building first, then what failed, what waits and what is done, as far as there is room."""
        from rich.table import Table
        from rich.text import Text

        now, grid = time.monotonic(), Table.grid(padding=(0, 2))
        failed = [number for number, (state, _) in self._over.items() if state == "failed"]
        waiting = [number for number in range(len(self._names)) if number not in self._begun and number not in self._over]
        done = [number for number in reversed(self._over) if number not in failed]
        rows = [*self._begun, *failed, *waiting, *done]
        for number in rows[:self._room]:
            grid.add_row(*map(Text, self._row(number, now)))
        more = f", {len(rows) - self._room} not shown" if len(rows) > self._room else ""
        grid.add_row("", Text(f"{len(self._over)} of {len(self._names)}{f', {len(failed)} failed' if failed else ''}{more}"))
        return grid

    def _row(self, number: int, now: float) -> tuple[str, str, str]:
        name = self._names[number]
        if number in self._over:
            state, seconds = self._over[number]
            return "✗" if state == "failed" else "✓", name, f"{state}, {seconds:.1f} s" if state != "there" else "already there"
        if number in self._begun:
            since, text = self._begun[number]
            return _SPINNER[int(now * 10) % len(_SPINNER)], name, text if text.startswith("waiting") else f"building, {now - since:.0f} s"
        return "·", name, "waiting"

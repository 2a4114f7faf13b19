"""An observation of ``opjit doctor``, and how a list of them is printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import click

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
_COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", PROBLEM: "red"}


class Observation(NamedTuple):
    """One line of the report.

    Attributes:
        about: the subject.
        state: ``"ok"``; ``"note"`` for information; ``"warning"`` where ops work, but slowly or unsafely; ``"problem"`` where ops
            cannot be built or loaded.
        seen: what the check saw, in one line.
        todo: what to do about a problem or a warning, in one line.
    """

    about: str
    state: str
    seen: str
    todo: str = ""


def from_error(about: str, state: str, error: BaseException, todo: str = "") -> Observation:
    """Turn an error into an observation. In opjit's own messages, the advice follows a semicolon."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    seen, _, advice = first.partition("; ")
    return Observation(about, state, seen, advice or todo)


def print_report(observations: Iterable[Observation], count: Mapping[str, int]) -> None:
    """Print each observation, then the number of problems and warnings; in colour on a terminal."""
    for observation in observations:
        click.echo(f"{click.style(f'{observation.state:<8}', _COLOURS[observation.state])} {observation.about}: {observation.seen}")
        if observation.todo:
            click.echo(f"{'':<8} do: {observation.todo}")
    click.echo(", ".join(f"{number} {state}{'s' * (number != 1)}" for state, number in count.items()))

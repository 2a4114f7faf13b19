"""``opjit doctor``: find out why ops cannot be built, cached or loaded on this machine, and how to fix it.

The checks run one after another, and each line is printed immediately. If a filesystem or driver hangs, the status line names the check.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator

import click
from rich.console import Console

from opjit.doctor import checks
from opjit.doctor.checks import NOTE, OK, PROBLEM, WARNING, Observation
from opjit.progress import readable

__all__ = ["NOTE", "OK", "PROBLEM", "WARNING", "Observation", "examine", "show"]

CHECKS = (
    checks.versions,
    checks.tools,
    checks.c_op,
    checks.gpus,
    checks.cuda_op,
    checks.programs,
    checks.cache,
    checks.remote,
    checks.variables,
)
_COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", PROBLEM: "red"}


def examine(before: Callable[[str], object] = lambda name: None) -> Iterator[Observation]:
    """Run every check, and yield its observations. `before` is called with the name of each check first.

    Example:
        >>> [observation for observation in opjit.doctor.examine() if observation.state == "problem"]
        []
    """
    for check in CHECKS:
        before(check.__name__)
        try:
            yield from check()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            yield Observation(
                check.__name__,
                WARNING,
                f"this check failed: {type(error).__name__}: {error} ({where.name})",
                "check it by hand; if the machine is not at fault, report a bug",
            )


def show(print_json: Callable[[object], None] | None = None) -> int:
    """Run every check, and print a report or, by `print_json`, the observations. Returns the exit code: 1 if there is a problem."""
    found = []
    with warnings.catch_warnings(), Console(stderr=True).status("checking") as status:
        warnings.simplefilter("ignore")  # the checks report the reasons of torch's warnings
        for observation in examine(lambda name: status.update(f"checking: {name}")):
            found.append(observation)
            if print_json is None:
                _print(observation)
    states = [observation.state for observation in found]
    if print_json is not None:
        print_json([observation._asdict() for observation in found])
    else:
        click.echo(
            ", ".join(
                f"{states.count(state)} {state}{'s' * (states.count(state) != 1)}"
                for state in (PROBLEM, WARNING)
            )
        )
    return int(PROBLEM in states)


def _print(observation: Observation) -> None:
    """Print an observation in 80 columns, with the state in color."""
    state = f"{observation.state:<8}"
    text = readable(f"{state} {observation.about}: {observation.seen}")
    click.echo(click.style(state, _COLOURS[observation.state]) + text.removeprefix(state))
    if observation.todo:
        click.echo(readable(f"{'':<8} do: {observation.todo}"))

"""``opjit doctor``: what on this machine keeps ops from being built, cached or loaded, and what to do about it.

Each check looks at one thing, in a thread of its own and for a bounded time. The user's cache is not touched, but for a folder that is
made in it to try its filesystem, and removed.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import NoReturn

from opjit.doctor import machine, places, trial
from opjit.doctor.finding import NOTE, OK, PROBLEM, WARNING, Finding

__all__ = ["NOTE", "OK", "PROBLEM", "WARNING", "Finding", "examine", "main", "show"]

SECONDS = 60.0  # for all checks together; they run side by side and take about five
CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "versions": machine.versions,
    "C op": trial.c_op,
    "GPU": machine.gpus,
    "CUDA op": trial.cuda_op,
    "cache": places.cache,
    "temporary folder": places.temporary,
    "builds": places.leftovers,
    "layers": machine.layers,
    "remote": machine.remote,
    "environment": machine.variables,
}
_THREADS = "opjit-doctor-"
_COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", PROBLEM: "bold red"}


def examine() -> list[Finding]:
    """Run every check; the findings come in the order of `CHECKS`. A check that hangs is a problem, and is left behind.

    Example:
        >>> [finding for finding in opjit.doctor.examine() if finding.state == "problem"]
        []
    """
    answers: dict[str, queue.SimpleQueue[list[Finding]]] = {name: queue.SimpleQueue() for name in CHECKS}
    for name, check in CHECKS.items():  # daemons: a filesystem that never answers does not keep the process
        threading.Thread(target=_answer, args=(name, check, answers[name]), name=f"{_THREADS}{name}", daemon=True).start()
    end = time.monotonic() + SECONDS
    findings = []
    for name, answer in answers.items():
        try:
            findings += answer.get(timeout=max(0.01, end - time.monotonic()))
        except queue.Empty:
            findings.append(Finding(name, PROBLEM, f"no answer within {SECONDS:.0f} s",
                                    "a filesystem, a compiler or a driver hangs: try again, then look at dmesg and the mounts"))
    return findings


def _answer(name: str, check: Callable[[], Iterable[Finding]], answer: queue.SimpleQueue[list[Finding]]) -> None:
    findings: list[Finding] = []
    try:
        findings.extend(check())  # what was found before an error stays
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        findings.append(Finding(name, WARNING, f"this could not be looked at: {type(error).__name__}: {error} ({where.name})",
                                "look at it by hand; if it is not the machine's fault, report it"))
    answer.put(findings)


def main(tell: Callable[[object], None] | None = None) -> NoReturn:
    """The command: `show`, and the end of the process."""
    code = show(tell)
    if any(thread.name.startswith(_THREADS) for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(code)  # an orderly end would remove the hanging check's folder, and hang as well
    sys.exit(code)


def show(tell: Callable[[object], None] | None = None) -> int:
    """Run every check and print what it found: a table on a terminal, else a line for each. Returns the command's exit code.

    Args:
        tell: takes the findings instead.
    """
    from rich.console import Console

    with warnings.catch_warnings():  # torch's remarks on a driver are the checks' to tell
        warnings.simplefilter("ignore")
        with Console(stderr=True).status("looking"):
            findings = examine()
    count = {state: sum(finding.state == state for finding in findings) for state in (PROBLEM, WARNING)}
    code = 1 if count[PROBLEM] else 0
    if tell is not None:
        tell([finding._asdict() for finding in findings])
        return code
    if sys.stdout.isatty():
        _print_table(findings)
    else:
        for finding in findings:
            print(f"{finding.state:<8} {finding.about}: {finding.seen}")
            if finding.todo:
                print(f"{'':<8} do: {finding.todo}")
    print(", ".join(f"{number} {state}{'s' * (number != 1)}" for state, number in count.items()))
    return code


def _print_table(findings: list[Finding]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("", "what", "seen"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        seen = Text(finding.seen + (f"\n-> {finding.todo}" if finding.todo else ""))
        table.add_row(Text(finding.state, style=_COLOURS[finding.state]), finding.about, seen)
    Console(highlight=False).print(table)

"""``opjit doctor``: finds what keeps ops from being built, cached or loaded on this machine, and says how to fix it.

Each check runs in its own thread, within a time limit. In the user's cache, the checks write only to a temporary folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import NoReturn

from opjit.doctor import compilers, folders, machine
from opjit.doctor.report import NOTE, OK, PROBLEM, WARNING, Observation, print_report

__all__ = ["NOTE", "OK", "PROBLEM", "WARNING", "Observation", "examine", "main", "show"]

TIMEOUT = 60.0  # seconds for all checks together; they run in parallel and take about five
CHECKS: dict[str, Callable[[], Iterable[Observation]]] = {
    "versions": machine.versions,
    "C op": compilers.c_op,
    "GPU": machine.gpus,
    "CUDA op": compilers.cuda_op,
    "cache": folders.cache,
    "temporary folder": folders.temporary,
    "builds": folders.builds,
    "remote": machine.remote,
    "environment": machine.variables,
}
_THREAD_PREFIX = "opjit-doctor-"


def examine() -> list[Observation]:
    """Run every check and return the observations in the order of `CHECKS`. A check that hangs is a problem, and is abandoned.

    Example:
        >>> [observation for observation in opjit.doctor.examine() if observation.state == "problem"]
        []
    """
    found: dict[str, list[Observation]] = {name: [] for name in CHECKS}
    threads = {name: threading.Thread(target=_run_check, args=(name, check, found[name]), name=f"{_THREAD_PREFIX}{name}", daemon=True)
               for name, check in CHECKS.items()}  # daemons: a check that hangs does not keep the process alive
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + TIMEOUT
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            found[name].append(Observation(name, PROBLEM, f"no answer within {TIMEOUT:.0f} s",
                                           "a filesystem, a compiler or a driver hangs: try again, then check dmesg and the mounts"))
    return [observation for observations in found.values() for observation in observations]


def _run_check(name: str, check: Callable[[], Iterable[Observation]], observations: list[Observation]) -> None:
    try:
        observations.extend(check())  # keeps what came before an error or a hang
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        observations.append(Observation(name, WARNING, f"this check failed: {type(error).__name__}: {error} ({where.name})",
                                        "check it by hand; if the machine is not at fault, report a bug"))


def main(print_json: Callable[[object], None] | None = None) -> NoReturn:
    """Run `show`, then end the process."""
    code = show(print_json)
    if any(thread.name.startswith(_THREAD_PREFIX) for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(code)  # a normal exit would remove the hanging check's folder, and hang too
    sys.exit(code)


def show(print_json: Callable[[object], None] | None = None) -> int:
    """Run every check and print a report. Returns the command's exit code: 1 if there is a problem.

    Args:
        print_json: prints the observations in place of the report.
    """
    from rich.console import Console

    with warnings.catch_warnings():  # the checks themselves report what torch warns of
        warnings.simplefilter("ignore")
        with Console(stderr=True).status("checking"):
            observations = examine()
    count = {state: sum(observation.state == state for observation in observations) for state in (PROBLEM, WARNING)}
    code = 1 if count[PROBLEM] else 0
    if print_json is not None:
        print_json([observation._asdict() for observation in observations])
        return code
    print_report(observations, count)
    return code

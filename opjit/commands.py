"""Commands that an interrupt ends together with what they started, and whose end no fork of another thread holds up."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from opjit import forks

_PATIENCE = 2.0  # seconds for a command to end what it started


def run(command: Any, *, check: bool = False, meanwhile: Callable[[], object] | None = None,
        **settings: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, except that at an error or interrupt the command is told to end, and killed only if it does not.

    Args:
        meanwhile: is done while the command runs.
        settings: of `subprocess.Popen`. Let stdin be a file: of a pipe that was written to, a forked child would have the end.
    """
    with forks.starting():
        process = subprocess.Popen(command, **settings)
    with process:
        try:
            if meanwhile is not None:
                meanwhile()
            output, errors = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class Commands:
    """Stands in for the module ``subprocess`` where torch's builder calls ninja and asks compilers for their versions.

    At an interrupt `subprocess.run` would kill ninja, and its compilers, each in a process group of its own, would go on to their end.
    """

    run = staticmethod(run)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def check_output(self, command: Any, **settings: Any) -> Any:
        return run(command, check=True, stdout=subprocess.PIPE, **settings).stdout

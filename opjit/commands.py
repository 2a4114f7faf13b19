"""Commands that an interrupt ends together with what they started, and whose end no fork of another thread holds up; and how torch's
builder comes to start its own that way, in an environment of its own.
"""

from __future__ import annotations

import os
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
        settings: of `subprocess.Popen`. stdin is no pipe: a forked child would have the end that is written to.
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

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: Any, **settings: Any) -> subprocess.CompletedProcess[Any]:
        return run(command, **{"env": self._environment, **settings})

    def check_output(self, command: Any, **settings: Any) -> Any:
        return self.run(command, check=True, stdout=subprocess.PIPE, **settings).stdout


class System:
    """Stands in for the module ``os`` where torch's builder looks at the environment.

    The process's own is everybody's: other threads, and what they start, would see a build's settings, and C code that reads it while
    it is changed may crash.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environ = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getenv(self, name: str, default: str | None = None) -> str | None:
        return self.environ.get(name, default)

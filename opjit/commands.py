"""Commands that an interrupt ends together with what they started."""

from __future__ import annotations

import subprocess
from typing import Any

_PATIENCE = 2.0  # seconds for a command to end what it started


class Commands:
    """Stands in for the module ``subprocess`` where torch's builder calls ninja.

    At an interrupt `subprocess.run` would kill ninja, and its compilers, each in a process group of its own, would go on to their end.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: list[str], *, check: bool = False, **settings: Any) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run`, except that at an error or interrupt the command is told to end, and killed only if it does not."""
        with subprocess.Popen(command, **settings) as process:
            try:
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

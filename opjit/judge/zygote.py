"""The process that forks the judge's children. It has imported torch and builders, and knows neither the task nor any result.

    judge ──control── zygote ──fork── keeper ──fork── child     runs one candidate, see child.py
      └──────────────leash──────────────┘               │
      └──────────────────────job────────────────────────┘

The keeper ends its child, and all that it started, when the judge lets go of the leash or ends itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from opjit import files
from opjit.judge import child, sandbox
from opjit.judge.wire import Channel
from opjit.testing.isolation import Child, end_with_parent

_MOST_PROCESSES = 256  # and threads, that a candidate may have started; compilers need a dozen


def main(control: Channel, scratch: Path) -> None:
    """Fork a keeper for each message until the judge is gone; then remove the folder of all."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Python warns of threads. Those of NumPy's OpenBLAS end before a fork. On an H100, CUDA's driver had one here, too, of unknown origin;
    # children made contexts beside it.
    warnings.simplefilter("ignore", DeprecationWarning)
    child.import_all()
    control.send({})
    with suppress(EOFError):
        while True:
            message, ends = control.receive()
            if os.fork() == 0:
                control.end.close()
                leash, job = (Channel(socket.socket(fileno=end)) for end in ends)
                _keep(leash, job, scratch / files.unique(), message)
            for end in ends:
                os.close(end)
    with suppress(ChildProcessError):
        os.wait()  # for all, as SIGCHLD is ignored
    files.remove_tree(scratch)


def _keep(leash: Channel, job: Channel, folder: Path, message: dict[str, Any]) -> None:
    """In the keeper: run a child, watch it, and say how it ended. Never returns."""
    groups = Path("/sys/fs/cgroup")
    group = (groups / "pids" if (groups / "pids").is_dir() else groups) / f"opjit-judge-{folder.name}"
    try:
        end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        first = _first_process() if message["many"] and sandbox.own_processes() else 0

        def run(_: object) -> None:
            leash.end.close()
            sandbox.limit(message["memory"])
            if first:
                sandbox.few_processes(group, _MOST_PROCESSES)
            child.serve(job, folder, message["device"], ["own processes"] if first else [])

        with Child(run) as process:
            job.end.close()
            said = {"ended": _watched(process, leash), "stderr": process.stderr()[-2000:]}
            if first:
                os.kill(first, signal.SIGKILL)  # and with it all processes of the namespace
        files.remove_tree(folder)
        leash.send(said)
    finally:
        for _ in range(50 if group.is_dir() else 0):
            with suppress(OSError):  # its last process is ending
                group.rmdir()
                break
            time.sleep(0.02)
        os._exit(0)


def _first_process() -> int:
    """Fork the first process of a namespace, which only waits."""
    found = os.fork()
    if found == 0:
        end_with_parent()
        while True:
            signal.pause()
    return found


def _watched(process: Child, leash: Channel) -> str:
    """Wait for the child's end, or for the judge to let go. Returns how the child ended."""
    with os.fdopen(os.pidfd_open(process.pid)) as ended:
        ready, _, _ = select.select([ended.fileno(), leash.end.fileno()], [], [])
        return process.end() if ended.fileno() in ready else "was ended"


if __name__ == "__main__":
    main(Channel(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2]))

"""The process that forks the judge's children. It has imported torch and builders, and knows neither the task nor any result.

    judge ──control── zygote ──fork── keeper ──fork── child     runs one candidate, see child.py
      └──────────────leash──────────────┘               │
      └──────────────────────job────────────────────────┘

The keeper ends its child, and all that it started, when the judge lets go of the leash or ends itself.
"""

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
from opjit.builder import torch_builder
from opjit.errors import CompileError, DeclarationError, OpjitError
from opjit.judge import child, sandbox
from opjit.judge.bench import Bench
from opjit.judge.verdict import Ended
from opjit.judge.wire import Channel, closing, content, sealed
from opjit.testing.isolation import Child, end_with_parent

_MOST_PROCESSES = 256  # and threads, that a candidate may have started; compilers need a dozen


def main(control: Channel, scratch: Path) -> None:
    """Fork a keeper for each message until the judge is gone; then remove the folder of all."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Python warns of threads. Those of NumPy's OpenBLAS end before a fork; CUDA's driver has one once it is loaded.
    warnings.simplefilter("ignore", DeprecationWarning)
    child.import_all()
    control.send({})
    with suppress(EOFError):
        while True:
            message, ends = control.receive()
            if message["many"]:
                torch_builder.torchs()  # for all children
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
    group = (
        groups / "pids" if (groups / "pids").is_dir() else groups
    ) / f"opjit-judge-{folder.name}"
    try:
        end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        held = (
            message["many"]
            and sandbox.can_have_own_processes(message["device"])
            and sandbox.own_processes()
        )
        first = _first_process() if held else 0

        def run(_: object) -> None:
            leash.end.close()
            sandbox.limit(message["memory"])
            if first:
                sandbox.few_processes(group, _MOST_PROCESSES)
            serve(
                job,
                Bench(message["device"])
                if message["bench"]
                else child.JudgedCode(
                    folder, message["device"], ["own processes"] if first else []
                ),
            )

        with Child(run) as process:
            job.end.close()
            with os.fdopen(os.pidfd_open(process.pid)) as ended:  # or the judge lets go
                ready, _, _ = select.select([ended.fileno(), leash.end.fileno()], [], [])
                said = {
                    "ended": process.end() if ended.fileno() in ready else "was ended",
                    "stderr": process.stderr()[-2000:],
                }
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
    reading, writing = os.pipe()
    found = os.fork()
    if found == 0:
        end_with_parent()
        sandbox.own_proc()
        os.close(writing)
        os.close(reading)
        while True:
            signal.pause()
    os.close(writing)
    os.read(reading, 1)  # until it is ready
    os.close(reading)
    return found


def serve(job: Channel, worker: Bench | child.JudgedCode) -> None:
    """Have a worker's methods answer the judge's messages, until it is gone."""
    with suppress(EOFError):
        while True:
            message, descriptors = job.receive()
            try:
                answer = getattr(worker, f"on_{message['do']}")(
                    message, [content(each) for each in descriptors]
                )
                bytes_ = answer.pop("data", None)
            except Exception as error:
                job.send(_problem(error))
                continue
            if bytes_ is None:
                job.send(answer)
            else:
                with closing(sealed(bytes_)) as data:
                    job.send(answer, data)


def _problem(error: Exception) -> dict[str, Any]:
    if isinstance(error, Ended):
        return {
            "error": error.word,
            "message": str(error),
            "facts": error.facts,
            "reusable": error.reusable,
        }
    kind = (
        "compile" if isinstance(error, (CompileError, DeclarationError, SyntaxError)) else "wrong"
    )
    if "CUDA error" in str(
        error
    ):  # the process can use the device no more; torch adds five lines of advice
        kind, error = "crash", RuntimeError(str(error).splitlines()[0])
    name = "" if isinstance(error, OpjitError) else f"{type(error).__name__}: "
    return {"error": kind, "message": f"{name}{error}"[:4000], "reusable": kind == "compile"}


if __name__ == "__main__":
    main(Channel(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2]))

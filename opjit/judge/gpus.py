"""A judge in a process for each GPU, so that a clock, a captured CUDA graph or Python's lock never waits for another GPU.

judge ──text, name──  process  a judge that sees one GPU, with a thread for each connection
      ────verdict───
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from opjit.errors import DeviceUnavailable, OpjitError
from opjit.judge.verdict import Verdict

# By name, because the module of `Judge` imports this one.
_START = "import sys; from opjit.judge.scheduler import judge_until_closed; judge_until_closed(*sys.argv[1:])"


def visible_gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each GPU that this process sees."""
    count = torch.cuda.device_count()
    every = ",".join(map(str, range(count)))
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")[:count]


class GpuProcesses:
    """Judges on several GPUs. The workers are dealt over them, and a candidate goes to the worker that waits longest."""

    def __init__(self, gpus: Sequence[str], workers: int, options: dict[str, Any]) -> None:
        self.processes = list[subprocess.Popen[bytes]]()
        self._gpus = gpus
        self._options = json.dumps(options)
        self._pipes = [Pipe() for _ in range(workers)]
        self._free = SimpleQueue[Connection]()
        self._numbers = itertools.count(1)  # of candidates

    def start(self) -> None:
        """Start a process for each GPU. Raises the errors of `Task`."""
        count = len(self._gpus)
        for number, gpu in enumerate(self._gpus):
            ends = [theirs.fileno() for _, theirs in self._pipes[number::count]]
            command = [sys.executable, "-c", _START, self._options, *map(str, ends)]
            process = subprocess.Popen(
                command,
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the judge's stdout may have verdicts
                start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
            )
            self.processes.append(process)
        for ours, theirs in self._pipes:
            theirs.close()
            self._free.put(ours)
        try:
            for ours, _ in self._pipes[:count]:
                _receive(ours, 0)
        except BaseException:
            self.close()
            raise

    def judge(self, text: str, name: str) -> Verdict:
        """Judge a candidate. Raises DeviceUnavailable if the process ended."""
        number = next(self._numbers)
        connection = self._free.get()
        try:
            with suppress(ConnectionError):
                connection.send((number, text, name))
            verdict: Verdict = _receive(connection, number)
        finally:
            self._free.put(connection)
        return verdict

    def close(self) -> None:
        """End the processes. Their workers end with them."""
        for process in self.processes:
            process.terminate()
            process.wait()


def _receive(connection: Connection, number: int) -> Any:
    """Return the answer with a number. The answers to interrupted calls come before it."""
    answered = -1
    while answered != number:
        try:
            answered, answer = connection.recv()
        except (EOFError, ConnectionError):
            raise DeviceUnavailable("the process that judges on one of the GPUs ended") from None
    if isinstance(answer, OpjitError):
        raise answer
    return answer

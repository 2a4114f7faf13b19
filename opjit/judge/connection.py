"""The judge's side of a worker: requests and answers, its end, and the results of a burst."""

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, TypeVar

from opjit.builder import budget
from opjit.judge.inputs import PackedInputs
from opjit.judge.protocol import Ask, Channel, Described, Done, Ran, forged, read_sealed
from opjit.judge.read_write_lock import ReadWriteLock
from opjit.judge.verdict import VerdictReached

A = TypeVar("A")

_LOAD_FACTOR = 4.0  # at most, by which a busy machine makes limits longer
_TURN = 0.1  # seconds in which a build keeps others from being timed
_STOP = 3.0  # seconds in which a worker stops. It cannot while it waits for its program to start
_LAST_WORDS = 10.0  # seconds that a keeper gets to clean up


def read_memory(pid: int, addresses: Sequence[int], sizes: Sequence[int]) -> bytearray:
    """Read regions of another process's memory. Raises OSError, or for impossible addresses OverflowError or ValueError."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        found = bytearray().join(map(os.pread, repeat(memory.fileno()), sizes, addresses))
    if len(found) != sum(sizes):
        raise OSError(f"read {len(found)} of {sum(sizes)} bytes")
    return found


def load_factor() -> float:
    """Return by how much a busy machine slows a process down."""
    return max(1.0, min(_LOAD_FACTOR, os.getloadavg()[0] / budget.cpus()))


class WorkerConnection:
    """The judge's ends of a worker's sockets: control leads to its keeper, requests to itself."""

    def __init__(self, control: Channel, requests: Channel) -> None:
        self._control = control
        self._requests = requests

    def ask(
        self, seconds: float, method: str, *descriptors: int, **arguments: Any
    ) -> dict[str, Any]:
        """Call a method of the worker, and return the facts of its answer.

        Raises VerdictReached if there is no answer, or if it is an error.
        """
        self.send(method, *descriptors, **arguments)
        return self.answer(Done, seconds)[0].facts

    def send(self, method: str, *descriptors: int, **arguments: Any) -> None:
        """Call a method of the worker."""
        with suppress(ConnectionError):  # the answer gives the reason
            self._requests.send(Ask(method, arguments), *descriptors)

    def wait_in_turns(self, lock: ReadWriteLock, seconds: float) -> None:
        """Wait until an answer can be read. The worker and its programs are stopped whenever another thread has the lock alone.

        Only the time of its turns counts, and that of each stop, which it may delay.
        """
        left = seconds * load_factor()
        self._command("freeze")
        while left > 0:
            with lock.shared():
                started = time.monotonic()
                self._command("resume")
                if select.select([self._requests.end], [], [], _TURN)[0]:
                    return
                self._command("freeze")
                left -= time.monotonic() - started
        raise VerdictReached("timeout", f"did not return within {seconds:g} s")

    def answer(
        self, kind: type[A], seconds: float, channel: Channel | None = None
    ) -> tuple[A, list[int]]:
        """Wait for an answer and its files, longer on a busy machine: the worker's or, from `channel`, the keeper's."""
        seconds *= load_factor()
        kinds: list[type[A | VerdictReached]] = [kind, VerdictReached]
        try:
            answer, files = (channel or self._requests).receive(kinds, seconds)
        except TimeoutError:
            raise VerdictReached("timeout", f"did not return within {seconds:g} s") from None
        except EOFError:
            raise self._death() from None
        if isinstance(answer, VerdictReached):
            raise answer
        return answer, files

    def run(
        self, inputs: PackedInputs, limit: int, seconds: float
    ) -> tuple[float, bytearray | None]:
        """Give the worker the values of a burst, and wait for the results.

        Returns the seconds until the worker was stopped, and the results, which are read before it
        goes on. If it cannot be read, the worker has copied them, and `describe` returns them.
        """
        started = time.perf_counter()
        self.send("run", *inputs.late, key=inputs.key, limit=limit)
        ran, _ = self.answer(Ran, seconds)
        if inputs.key is not None:
            return time.perf_counter() - started, None
        pid = self._command("freeze")
        took = time.perf_counter() - started
        if min(ran.sizes, default=0) < 0 or sum(ran.sizes) > limit:
            raise forged(f"results of {ran.sizes} bytes, where at most {limit} are expected")
        try:
            results = read_memory(pid, ran.addresses, ran.sizes)
        except (OSError, OverflowError, ValueError) as error:
            raise forged(f"results at addresses that cannot be read: {error}") from None
        self._command("resume")
        return took, results

    def describe(self, limit: int, seconds: float) -> tuple[Described, bytearray]:
        """Return the description of a burst's results, and their bytes if they were copied."""
        self.send("describe")
        described, files = self.answer(Described, seconds)
        if len(files) != 1:
            raise forged(f"expected a file of results, got {len(files)}")
        return described, read_sealed(files[0], limit)

    def _command(self, method: str) -> Any:
        """Let the keeper stop the worker, or let it go on. Returns the number of the worker's process."""
        with suppress(ConnectionError):  # the answer gives the reason
            self._control.send(Ask(method, {}))
        return self.answer(Done, _STOP, self._control)[0].facts["pid"]

    def _death(self) -> VerdictReached:
        """Return why the worker ended, if the keeper reports it in time."""
        with suppress(EOFError, TimeoutError):
            return self._control.receive([VerdictReached], _LAST_WORDS)[0]
        return VerdictReached("crash", "its process ended")

    def close(self) -> None:
        """Let go of the worker, which ends it."""
        self._control.end.close()
        self._requests.end.close()

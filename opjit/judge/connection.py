"""The judge's side of a worker: requests and answers, its end, and its memory while it is stopped."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from opjit.builder import budget
from opjit.judge.protocol import (
    MESSAGE_LIMIT,
    Channel,
    Died,
    Failed,
    Probe,
    Ran,
    Request,
    Resume,
    Run,
    Stopped,
    read_sealed,
)
from opjit.judge.verdict import VerdictReached

A = TypeVar("A")

_LOAD_FACTOR = 4.0  # at most, by which a busy machine makes limits longer
_LAST_WORDS = 10.0  # seconds that a keeper gets to clean up


def read_memory(pid: int, addresses: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """Read regions of another process's memory. Raises OSError."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        try:
            regions = list(map(os.pread, repeat(memory.fileno()), sizes, addresses))
        except (OSError, OverflowError) as error:
            raise OSError(f"a region cannot be read: {error}") from error
    if [*map(len, regions)] != [*sizes]:
        raise OSError(f"read {sum(map(len, regions))} of {sum(sizes)} bytes")
    return regions


def load_factor() -> float:
    """Return by how much a busy machine slows a process down."""
    return max(1.0, min(_LOAD_FACTOR, os.getloadavg()[0] / budget.cpus()))


class Frozen(NamedTuple):
    """A worker that has stopped after its calls."""

    seconds: float  # from the request until it stood still
    pid: int
    addresses: tuple[tuple[int, ...], ...]  # of each call's results


class WorkerConnection:
    """The judge's ends of a worker's sockets: control leads to its keeper, requests to itself."""

    def __init__(self, control: Channel, requests: Channel) -> None:
        self._control = control
        self._requests = requests

    def ask(
        self,
        asked: Request,
        kind: type[A],
        *descriptors: int,
        seconds: float,
        data_limit: int = 0,
    ) -> tuple[A, list[bytearray]]:
        """Send a request and wait for its answer, and for files of at most so many bytes.

        Raises VerdictReached if there is no answer, or if it is an error.
        """
        self._send(asked, *descriptors)
        return self._answer(kind, seconds * load_factor(), data_limit)

    def _send(self, asked: Request, *descriptors: int) -> None:
        with suppress(ConnectionError):  # the answer gives the reason
            self._requests.send(asked, *descriptors)

    def _answer(
        self, kind: type[A], seconds: float, data_limit: int = 0
    ) -> tuple[A, list[bytearray]]:
        answer: A | Failed
        try:
            answer, received = self._requests.receive([kind, Failed], seconds)
            data = [read_sealed(each, data_limit + MESSAGE_LIMIT) for each in received]
        except TimeoutError:
            raise _timeout(seconds) from None
        except EOFError:
            raise self._death(_LAST_WORDS) or _ended() from None
        if isinstance(answer, Failed):
            raise VerdictReached(answer.word, answer.message, answer.reusable, **_facts(answer))
        return answer, data

    def freeze(self, asked: Run | Probe, seconds: float) -> Frozen:
        """Let the worker make its calls, and wait until it has stopped, so that later work does not count.

        Raises VerdictReached as `ask` does.
        """
        self._forget_stops()
        seconds *= load_factor()
        started = time.perf_counter()
        self._send(asked)
        event: Stopped | Died
        try:
            event, _ = self._control.receive([Stopped, Died], seconds)
        except TimeoutError:
            raise _timeout(seconds) from None
        except EOFError:
            raise _ended() from None
        took = time.perf_counter() - started
        if isinstance(event, Died):
            raise _reason(event)

        answer, _ = self._answer(Ran, seconds)
        return Frozen(took, event.pid, answer.addresses)

    def resume(self) -> None:
        """Let a stopped worker go on."""
        with suppress(ConnectionError):
            self._control.send(Resume())

    def _forget_stops(self) -> None:
        """Forget that a candidate stopped itself at some other time."""
        death = self._death(0.0)
        if death is not None:
            raise death

    def _death(self, seconds: float) -> VerdictReached | None:
        """Return why the worker ended, if the keeper reports it within so many seconds."""
        event: Stopped | Died
        with suppress(EOFError, BlockingIOError, TimeoutError):
            while True:
                event, _ = self._control.receive([Stopped, Died], seconds)
                if isinstance(event, Died):
                    return _reason(event)
        return None

    @property
    def ends(self) -> list[Channel]:
        return [self._control, self._requests]

    def close(self) -> None:
        """Let go of the worker, which ends it."""
        for each in self.ends:
            each.end.close()


def _facts(failed: Failed) -> dict[str, Any]:
    found = {"max_error": failed.max_error, "sample": failed.sample, "tolerance": failed.tolerance}
    return {name: value for name, value in found.items() if value is not None}


def _ended() -> VerdictReached:
    return VerdictReached("crash", "its process ended")


def _timeout(seconds: float) -> VerdictReached:
    return VerdictReached("timeout", f"did not return within {seconds:g} s")


def _reason(died: Died) -> VerdictReached:
    if "SIGSYS" in died.how:
        message = "makes a system call that computing does not need, for which the kernel ended it"
        return VerdictReached("cheat", message)
    last_line = died.stderr.strip().splitlines()[-1:]
    return VerdictReached("crash", ": ".join([died.how, *last_line]))

"""Processes that do numbered pieces of work, one each at a time, forked from this one: what it has imported and declared, they have.

Processes, because torch's builder needs a whole process to itself; forked, because importing torch takes a second. Each leads a process
group of its own, which its compilers are in: Ctrl-C reaches this process alone, and it ends the groups. When this process dies in
whatever way, the others see it at the end of a pipe, and end. Their end is an interrupt, so that they leave nothing half done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple

from opjit import counters, files
from opjit.errors import OpjitError

TICK = 0.2  # seconds between two times that the caller is given the word
_PATIENCE = 5.0  # seconds between the polite signal and the other one
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Event(NamedTuple):
    """What became of a piece of work.

    Attributes:
        number: which.
        state: "started", then any number of "says", then "done" or "died".
        detail: what it says or returned; or of a process that died, its exit code: a signal is negative.
    """

    number: int
    state: str
    detail: Any = None


class _Worker(NamedTuple):
    pid: int
    pipe: Connection
    busy: list[int]  # the number of the piece at hand, or nothing


def run(order: Sequence[int], work: Callable[[int, Callable[[str], None]], Any], size: int) -> Generator[Event | None, None, None]:
    """Do all pieces of work, in the order given; yields what happens, and None now and then while nothing does.

    A process that dies takes its piece with it, and another one goes on with the rest. When the caller stops listening, or is
    interrupted, all processes and what they started are ended.

    Args:
        work: ``work(number, say)`` in one of the processes; it raises nothing, and returns what can be pickled.
        size: how many processes.

    Raises:
        OpjitError: no process can be started.
    """
    waiting = list(reversed(order))
    alive, life = os.pipe()
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.busy for worker in workers):
            while waiting and len(workers) < size:
                try:
                    workers.append(_start(work, alive, life))
                except OSError as error:
                    if not workers:
                        raise OpjitError(f"no process can be started to build in: {error}") from error
                    size = len(workers)  # so many, then
            for worker in workers:
                if waiting and not worker.busy:
                    worker.busy.append(waiting.pop())
                    with suppress(OSError):  # it died; that is seen below
                        worker.pipe.send(worker.busy[0])
                    yield Event(worker.busy[0], "started")
            ready = connection.wait([worker.pipe for worker in workers], TICK)
            for worker in [worker for worker in workers if worker.pipe in ready]:
                yield _hear(worker, workers)
            if not ready:
                yield None
    finally:
        for worker in workers:
            if not worker.busy:
                with suppress(OSError):
                    worker.pipe.send(None)
        _end([worker.pid for worker in workers], [worker.pid for worker in workers if worker.busy])
        for worker in workers:
            worker.pipe.close()
        os.close(life)
        os.close(alive)


def _hear(worker: _Worker, workers: list[_Worker]) -> Event | None:
    try:
        state, detail = worker.pipe.recv()
    except (EOFError, OSError):
        workers.remove(worker)
        worker.pipe.close()
        code = _end([worker.pid], [worker.pid])
        return Event(worker.busy[0], "died", code) if worker.busy else None
    number = worker.busy[0]
    if state != "says":
        worker.busy.clear()
    return Event(number, state, detail)


def _end(pids: list[int], busy: list[int]) -> int:
    """End processes and, of those at work, what they started; returns the last one's exit code."""
    for pid in busy:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)  # ninja passes it on to its compilers, each of which has a group of its own
    deadline, code = time.monotonic() + _PATIENCE, 0
    for pid in pids:
        while True:
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # the program around this one waits for all children itself
                break
            if done:
                code = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(0.002)
    return code


def _start(work: Callable[[int, Callable[[str], None]], Any], alive: int, life: int) -> _Worker:
    ours, theirs = connection.Pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or the child has what is in it too
    with _uninterrupted() as mask, warnings.catch_warnings():
        # Python 3.12 warns of forks beside other threads; the child takes no lock that one of them may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            code, interrupted = 1, False
            try:
                try:
                    os.setpgid(0, 0)
                    ours.close()
                    os.close(life)
                    _become(mask)
                    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
                    _serve(work, theirs)
                    code = 0
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    files.remove_own()
                    counters.write()
            finally:
                if interrupted:  # the parent shall read from the status what ended it
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.kill(os.getpid(), signal.SIGTERM)
                os._exit(code)
        with suppress(OSError):  # it did so itself, or has ended
            os.setpgid(pid, pid)
    theirs.close()
    return _Worker(pid, ours, [])


@contextmanager
def _uninterrupted() -> Iterator[set[int]]:
    """Keep signals waiting until the child has left this process's group and does with them what is its own."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    mask = {int(number) for number in blocked}
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become(mask: set[int]) -> None:
    """A process that signals interrupt, whatever this one's parent does with them."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - _SIGNALS)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Once: a job scheduler may send each process a signal, and this one's parent sends it another."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent(alive: int) -> None:
    """The pipe's other end is the parent's alone; nothing is ever written to it."""
    os.read(alive, 1)
    os.killpg(0, signal.SIGTERM)
    time.sleep(_PATIENCE)
    os.killpg(0, signal.SIGKILL)


def _serve(work: Callable[[int, Callable[[str], None]], Any], pipe: Connection) -> None:
    """Do what comes through the pipe, until that is None."""
    while (number := pipe.recv()) is not None:
        pipe.send(("done", work(number, lambda text: pipe.send(("says", text)))))

"""Worker processes, forked from this one, that each do one numbered task at a time.

torch's builder needs a process to itself, and importing torch takes a second, so workers are forked. Each leads a process group with its
compilers: Ctrl-C reaches only the parent, which terminates the groups. If the parent dies, its workers notice the end of a pipe and
terminate. Termination raises KeyboardInterrupt in a worker, so that it cleans up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import FrameType
from typing import Any, NamedTuple

from opjit import files
from opjit.errors import OpjitError
from opjit.store import usage

TICK = 0.2  # seconds between two results of `run`
_TERM_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Event(NamedTuple):
    """An event of a task.

    Attributes:
        number: the task's.
        state: "started", then any number of "reports", then "done" or "died".
        detail: the report, the result, or the exit code of a process that died (negative for a signal).
    """

    number: int
    state: str
    detail: Any = None


class _Worker(NamedTuple):
    process: ForkProcess
    pid: int
    pipe: Connection
    busy: list[int]  # the number of its task, or empty


def run(order: Sequence[int], work: Callable[[int, Callable[[str], None]], Any], size: int) -> Generator[Event | None, None, None]:
    """Do all tasks, in the given order. Yields events, and None now and then while there are none.

    When a worker dies, its task is lost and another worker takes over the rest. When the caller closes the generator or is interrupted, all
    workers and their children are terminated. Raises OpjitError if no process can be started.

    Args:
        work: ``work(number, report)``, called in a worker; raises nothing, returns a picklable result.
        size: the number of workers.
    """
    waiting = list(reversed(order))
    read_end, write_end = os.pipe()
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.busy for worker in workers):
            while waiting and len(workers) < size:
                try:
                    workers.append(_start(work, read_end, write_end))
                except OSError as error:
                    if not workers:
                        raise OpjitError(f"no worker process can be started: {error}") from error
                    size = len(workers)  # make do with these
            for worker in workers:
                if waiting and not worker.busy:
                    worker.busy.append(waiting.pop())
                    with suppress(OSError):  # it died, as `_receive` will notice
                        worker.pipe.send(worker.busy[0])
                    yield Event(worker.busy[0], "started")
            ready = connection.wait([worker.pipe for worker in workers], TICK)
            for worker in [worker for worker in workers if worker.pipe in ready]:
                yield _receive(worker, workers)
            if not ready:
                yield None
    finally:
        for worker in workers:
            if not worker.busy:
                with suppress(OSError):
                    worker.pipe.send(None)
        _terminate(workers)
        os.close(write_end)
        os.close(read_end)


def _receive(worker: _Worker, workers: list[_Worker]) -> Event | None:
    try:
        state, detail = worker.pipe.recv()
    except (EOFError, OSError):
        workers.remove(worker)
        code = _terminate([worker])
        return Event(worker.busy[0], "died", code) if worker.busy else None
    number = worker.busy[0]
    if state != "reports":
        worker.busy.clear()
    return Event(number, state, detail)


def _terminate(workers: Sequence[_Worker]) -> int:
    """Terminate busy workers and their children, and wait for all. Returns the last worker's exit code."""
    for worker in workers:
        if worker.busy:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGTERM)  # ninja passes it on to its compilers, which have groups of their own
    deadline, code = time.monotonic() + _TERM_TIMEOUT, 0
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        worker.process.join()
        worker.pipe.close()
        code = worker.process.exitcode or 0
    return code


def _start(work: Callable[[int, Callable[[str], None]], Any], read_end: int, write_end: int) -> _Worker:
    ours, theirs = connection.Pipe()
    with _signals_blocked() as mask, warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads; the child takes no lock that a thread may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = ForkProcess(target=_main, args=(work, ours, theirs, read_end, write_end, mask), daemon=True)
        process.start()
        assert process.pid is not None
        with suppress(OSError):  # it has done so already, or has ended
            os.setpgid(process.pid, process.pid)
    theirs.close()
    return _Worker(process, process.pid, ours, [])


def _main(work: Callable[[int, Callable[[str], None]], Any], ours: Connection, theirs: Connection, read_end: int, write_end: int,
          mask: set[int]) -> None:
    """Run a worker's main loop: do the tasks from the pipe, until it sends None."""
    os.setpgid(0, 0)
    ours.close()
    os.close(write_end)
    _handle_signals(mask)
    threading.Thread(target=_terminate_with_parent, args=(read_end,), daemon=True).start()
    try:
        while (number := theirs.recv()) is not None:
            theirs.send(("done", work(number, lambda text: theirs.send(("reports", text)))))
    except KeyboardInterrupt:
        files.remove_own()
        usage.write()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # show the signal in the exit status
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _signals_blocked() -> Iterator[set[int]]:
    """Block signals until the child has left this process's group and installed its own handlers."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    mask = {int(number) for number in blocked}
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _handle_signals(mask: set[int]) -> None:
    """Make signals interrupt this process, whatever the parent's handlers are."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - _SIGNALS)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt once: a job scheduler may signal every process, and the parent signals again."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _terminate_with_parent(read_end: int) -> None:
    """Wait for the parent's death: only the parent has the pipe's other end, and it never writes."""
    os.read(read_end, 1)
    os.killpg(0, signal.SIGTERM)
    time.sleep(_TERM_TIMEOUT)
    os.killpg(0, signal.SIGKILL)

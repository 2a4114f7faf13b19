"""Run checks in child processes.

If an op ends or blocks its process, only the check that called it fails. A child is a fork of this
process, which has imported torch but called no op. It reports each call through a pipe, so a crash
can be attributed to a call.
"""

import ctypes
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from opjit import processes
from opjit.errors import OpjitError
from opjit.operators.op import Op
from opjit.testing.checks import Check, Line, outcome_of
from opjit.testing.samples import CallWatch, watch

_M_PERTURB = -6
_DYING = 20.0  # seconds that a sanitizer gets for its report
_LOOKS = 20  # at a call's threads within its time limit
_MOST = 1 << 20  # bytes of stderr
# glibc fills new memory with its complement, 0xfe: an element that a kernel forgets is no 0.
_FRESH = 1


class Child(AbstractContextManager["Child"]):
    """A forked process that runs `work`, with the end of the pipe as its argument, and the
    messages that it sends through the pipe.
    """

    def __init__(self, work: Callable[[Connection], object]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._read = 0
        self.messages, theirs = Pipe(duplex=False)
        self._process = get_context("fork").Process(target=self._run, args=(work, theirs))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _run(self, work: Callable[[Connection], object], pipe: Connection) -> None:
        """In the child: end with the parent, but not by a terminal's Ctrl-C, which is the parent's to handle."""
        os.setpgid(0, 0)
        libc = ctypes.CDLL(None)
        processes.end_with_parent()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_PERTURB, _FRESH)
        os.dup2(self._errors.fileno(), 2)
        try:
            work(pipe)
        finally:
            libc.fflush(None)  # the output of a kernel

    def stderr(self) -> str:
        """The text that the process has written to stderr since the last call."""
        text = os.pread(self._errors.fileno(), _MOST, self._read)
        self._read += len(text)
        return text.decode(errors="replace")

    def abort(self) -> None:
        """End a call that is too slow: by SIGABRT, after which sanitizers report the line, or
        otherwise by SIGKILL.
        """
        for number in (signal.SIGABRT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
            if self.messages.poll(_DYING):
                return

    def end(self) -> str:
        """Wait for the process, and return how it ended."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        if code >= 0:
            return f"ended the process with exit({code})"
        return f"died of {next((each.name for each in signal.Signals if each == -code), f'signal {-code}')}"

    def __exit__(self, *_: object) -> None:
        self.messages.close()
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # compilers, too
            self._process.kill()  # even if it does not have a separate group yet
        self._process.join()
        self._errors.close()


def apart(work: Callable[[], object]) -> None:
    """Run a function in a child and return its output, so that this process does not initialize
    CUDA.
    """
    with Child(lambda pipe: work()) as child:
        with suppress(EOFError):
            child.messages.recv()
        print(child.stderr(), end="", file=sys.stderr, flush=True)


def _is_late(child: Child, limit: float) -> bool:
    """Whether no message comes until a thread has run for so long, or all have slept: a wait for a processor is not the call's."""
    slept = 0.0
    start = dict[str, float]()
    while not child.messages.poll(limit / _LOOKS):
        now = _threads(child.pid)
        start = start or {number: seconds for number, seconds, _ in now}
        slept += limit / _LOOKS * all(asleep for _, _, asleep in now)
        if max([slept, *(seconds - start.get(number, 0) for number, seconds, _ in now)]) >= limit:
            return True
    return False


def _threads(pid: int) -> list[tuple[str, float, bool]]:
    """The threads of a process: each one's number, its CPU time in seconds, and whether it sleeps, by proc(5)."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            state, *fields = path.read_text("ascii", "replace").rpartition(")")[2].split()
            found.append(
                (
                    path.parent.name,
                    (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK"),
                    state == "S",
                )
            )
    return found


class Death(NamedTuple):
    """The end of a child in a check; `number` and `sample` are the call's, if there was one, and `subject` is what ran."""

    check: str
    number: int | None
    sample: str
    how: str
    stderr: str
    late: bool
    subject: str

    def line(self) -> Line:
        said = [text for text in self.stderr.strip().splitlines() if text.strip()]
        where = f" on ({self.sample})" if self.number is not None else " before its first call"
        return Line(
            self.check,
            "failed",
            f"the {self.subject} {self.how}{where}{f': {said[-1].strip()}' if said else ''}",
            self.number,
        )


def supervise(
    op: Op,
    device: str,
    checks: Sequence[Check],
    seconds: float,
    prepare: Callable[[], object],
    only: int | None = None,
) -> Iterator[Line | Death]:
    """Run checks, in one child while none dies. Yields each check's line, or its death. `prepare` runs first in each child; if it raises an
    error, no check is run. `seconds` are for one call's busiest thread, or sleep; torch's compiling gets a multiple. `only`: one."""
    left = list(checks)
    late = 0
    while left:
        with Child(lambda pipe: _run_in_child(pipe, op, device, left, prepare, only)) as child:
            for event in _events(child, left, seconds):
                yield event
                late += isinstance(event, Death) and event.late
                if isinstance(event, Line) and event.name == "build":
                    return
        if late > 1:
            yield from (
                Line(check.name, "skipped", "not run, because two checks before it did not end")
                for check in left
            )
            return


def _events(child: Child, left: list[Check], seconds: float) -> Iterator[Line | Death]:
    """Yield lines until the child ends, and its death if it ends early.

    Removes their checks from the list.
    """
    number = None
    sample = ""
    late = False
    subject = "kernel"
    while left:
        limit = seconds * left[0].timeout_factor
        try:
            if number is not None and _is_late(child, limit):
                late = True
                child.abort()
            message = child.messages.recv()
        except (EOFError, ConnectionResetError):
            ended = child.end()
            yield Death(
                left.pop(0).name,
                number,
                sample,
                f"did not return within {limit:g} s" if late else ended,
                child.stderr(),
                late,
                subject,
            )
            return
        if isinstance(message, Line):
            print(child.stderr(), end="", file=sys.stderr, flush=True)
            if message.name != "build":
                left.pop(0)
            yield message
            if message.name == "build" or _is_lost(message):
                return
            number = None
        elif isinstance(message, str):
            subject = message
        else:
            number, sample = message
            subject = "kernel"


def _is_lost(line: Line) -> bool:
    """Return whether CUDA rejects all further calls from the process."""
    return line.status == "failed" and "CUDA error" in line.note


def _run_in_child(
    pipe: Connection,
    op: Op,
    device: str,
    checks: Sequence[Check],
    prepare: Callable[[], object],
    only: int | None,
) -> None:
    """In the child: make the op ready, run its checks, and report them."""
    try:
        prepare()
    except Exception as error:  # in the op's kernel or its op.py
        frames = traceback.extract_tb(error.__traceback__)
        places = [
            f"{Path(each.filename).name}:{each.lineno}: "
            for each in frames
            if Path(each.filename).is_relative_to(op.folder)
        ]
        known = isinstance(error, OpjitError)
        pipe.send(
            Line(
                "build",
                "failed",
                str(error) if known else f"{''.join(places[-1:])}{type(error).__name__}: {error}",
            )
        )
        return
    for check in checks:
        watched = CallWatch(pipe.send, only)
        watch.set(watched)
        line = outcome_of(check.name, partial(check.__call__, op, device))
        pipe.send(line._replace(number=watched.number) if line.status == "failed" else line)
        if _is_lost(line):
            return

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
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

from opjit import processes
from opjit.errors import OpjitError
from opjit.operators.op import Op
from opjit.testing.checks import BUILD, Check, Death, Line, outcome_of
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
        os.setsid()  # a busy machine's kernel divides the CPUs among sessions
        libc = ctypes.CDLL(None)
        processes.end_with_parent()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:  # a real-time signal
            return f"died of signal {-code}"

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
            ticks = int(fields[10]) + int(fields[11])
            found.append((path.parent.name, ticks / os.sysconf("SC_CLK_TCK"), state == "S"))
    return found


def supervise(
    op: Op,
    device: str,
    checks: Sequence[Check],
    seconds: float,
    prepare: Callable[[], object],
    only: int | None = None,
) -> Iterator[Line]:
    """Run checks, in one child while none dies, and yield each check's line. `prepare` runs first in each child; if it raises an error, no
    check is run. `seconds` are for one call's busiest thread, or sleep; torch's compiling gets a multiple. `only`: one."""
    left = list(checks)
    late = 0
    while left:
        with Child(lambda pipe: _run_in_child(pipe, op, device, left, prepare, only)) as child:
            for line in _lines(child, left, seconds):
                yield line
                late += line.death is not None and line.death.late
                if line.name == BUILD:
                    return
        if late > 1:
            for check in left:
                note = "not run, because two checks before it did not end"
                yield Line(check.name, "skipped", note)
            return


def _lines(child: Child, left: list[Check], seconds: float) -> Iterator[Line]:
    """Yield lines until the child ends, the last of which may be about its death.

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
            how = f"did not return within {limit:g} s" if late else ended
            death = Death(how, sample, child.stderr(), late)
            where = "before its first call" if number is None else f"on ({sample})"
            said = [text.strip() for text in death.stderr.splitlines() if text.strip()]
            note = ": ".join([f"the {subject} {how} {where}", *said[-1:]])
            yield Line(left.pop(0).name, "failed", note, number, death=death)
            return
        if isinstance(message, Line):
            print(child.stderr(), end="", file=sys.stderr, flush=True)
            yield message
            # CUDA rejects all further calls from the process after an error.
            is_lost = message.status == "failed" and "CUDA error" in message.note
            if message.name == BUILD:
                return
            left.pop(0)
            number = None
            if is_lost:
                return
        elif isinstance(message, str):
            subject = message
        else:
            number, sample = message
            subject = "kernel"


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
        places = [
            f"{Path(frame.filename).name}:{frame.lineno}: "
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).is_relative_to(op.folder)
        ]
        text = str(error)
        if not isinstance(error, OpjitError):
            text = f"{''.join(places[-1:])}{type(error).__name__}: {text}"
        pipe.send(Line(BUILD, "failed", text))
        return
    for check in checks:
        watch.set(CallWatch(pipe.send, only))
        line = outcome_of(check.name, partial(check.__call__, op, device))
        pipe.send(replace(line, number=watch.get().number) if line.status == "failed" else line)

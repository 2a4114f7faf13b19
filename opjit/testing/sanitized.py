"""A process whose samples run under gcc's sanitizers: it starts once for a command, and takes one op after the other.

The process has the sanitizers' libraries loaded from its start. It compiles each op's kernel for them, and runs the checks in children,
as the checks themselves run. torch is not instrumented: its allocations are checked, but not its mixture of new and free.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any, NamedTuple

import torch

from opjit.declare import registry
from opjit.declare.op import Op
from opjit.recipe import toolchain
from opjit.testing import compare, numerics, refusals, reports, sanitize
from opjit.testing.checks import Check, Line, tally
from opjit.testing.isolation import Death, Limits, supervise
from opjit.testing.samples import SMALL, Skipped, distinct_samples, effects, samples
from opjit.testing.trials import trials

_CXX = "libstdc++.so.6"  # must be loaded at the start: without its __cxa_throw, libasan aborts at torch's first exception
_LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so", "leak": "liblsan.so", "thread": "libtsan.so"}
_OPTIONS = {"UBSAN_OPTIONS": "print_stacktrace=1",
            "ASAN_OPTIONS": "alloc_dealloc_mismatch=0:detect_odr_violation=0:verify_asan_link_order=0:handle_abort=1:"
                            "allocator_may_return_null=1:detect_leaks=",
            "LSAN_OPTIONS": "detect_leaks=1",
            "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=0:report_signal_unsafe=0:handle_abort=1"}
_START = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
_QUIET = f"import ctypes; ctypes.CDLL(None).__lsan_disable(); {_START}"  # what Python and torch keep is no leak of the op's
CHECKS = [*numerics.CHECKS, *refusals.CHECKS]
_STANDS_FOR = {"leak": "memory", "thread": "threads"}  # the checks whose calls a sanitizer's own check makes


class SanitizerRun(NamedTuple):
    """What the sanitizers found in one op.

    Attributes:
        line: for the table.
        sample: of the call that ended; None if nothing was found.
        text: the report in one line; None if there is none.
    """

    line: Line
    sample: str | None = None
    text: str | None = None


class Sanitizers:
    """The process, from its parent's side.

    Args:
        names: ``thread``, or some of the others.
        seconds: the time limit for one call.
        scratch: a folder for instrumented kernels.

    Raises:
        Skipped: the compiler has no library for them.
        CompilerMissing: there is no compiler.
    """

    def __init__(self, names: Sequence[str], seconds: float, scratch: str) -> None:
        self.names, self.name = names, "+".join(names)
        compiler = toolchain.require_compiler(None)
        libraries = [_LIBRARIES[name] for name in names if name != "leak" or "address" not in names]  # which looks for leaks, too
        queries = ([compiler.path, f"-print-file-name={library}"] for library in libraries)
        found = [subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() for command in queries]
        if not all(map(os.path.isabs, found)):
            raise Skipped(f"{compiler.path} has no library for -fsanitize={','.join(names)}")
        self._finding: SanitizerRun | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-c", _QUIET if "leak" in names else _START, ",".join(names), str(seconds), scratch], text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
            env={**os.environ, **_OPTIONS, "PYTHONPATH": sanitize.python_path(), "LD_PRELOAD": " ".join([*found, _CXX]),
                 "ASAN_OPTIONS": f"{_OPTIONS['ASAN_OPTIONS']}{int('leak' in names)}"})

    def __enter__(self) -> Sanitizers:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def begin(self, op: Op, only: Sequence[str] = (), number: int | None = None) -> None:
        """Have an op's calls made: all of them, or some checks', or one."""
        self._op, self._finding = op, None
        self._reports: dict[str, str] = {}  # by sample
        self._ask(only, number)

    def finding(self) -> SanitizerRun:
        """What came of it, when the calls are made."""
        if self._finding is None:
            self._finding = self._answer()
        return self._finding

    def report(self, death: Death) -> str | None:
        """Where the kernel was when it died: under the sanitizers, on the same sample. Checks within torch only look it up."""
        found = self.finding()
        if found.sample and found.text:
            self._reports.setdefault(found.sample, found.text)
        if death.sample not in self._reports and {"address", "undefined"} & set(self.names) and any(
                check.name == death.check for check in CHECKS):
            self._ask([death.check], death.number)
            text = self._answer().text
            if text:
                self._reports[death.sample] = text
        return self._reports.get(death.sample)

    def _ask(self, only: Sequence[str], number: int | None) -> None:
        question = {"folder": str(self._op.folder), "op": self._op.qualified, "only": only, "number": number}
        with suppress(BrokenPipeError):  # `_answer` says why
            print(json.dumps(question), file=self._process.stdin, flush=True)

    def _answer(self) -> SanitizerRun:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            return SanitizerRun(Line(self.name, "skipped", f"Python does not run under them: {said[-1] if said else 'it printed nothing'}"))
        line, *rest = json.loads(text)
        return SanitizerRun(Line(*line), *rest)


def _answer(op: Op, names: Sequence[str], only: Sequence[str], number: int | None, limits: Limits, folder: Path) -> SanitizerRun:
    """In the process: make an op's calls until a child dies."""
    library = folder / "sanitized.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        sanitize.instrumented(op, names, toolchain.require_compiler(None).path, folder)
    made = 0
    _await_threads()
    checks = chosen(names, only)
    alone = number if all(check in CHECKS or _STANDS_FOR[check.name] in only for check in checks) else None
    for event in supervise(op, "cpu", checks, limits, lambda: _register(op, library), alone):
        if isinstance(event, Death):
            text = _place(event, op.folder)
            return SanitizerRun(Line("+".join(names), "failed", f"{text or event.how} on ({event.sample}) in {event.check}", event.number),
                           event.sample, text)
        if event.name == "build" or (event.status == "failed" and event.name in names):
            return SanitizerRun(Line("+".join(names), "failed", event.note))
        made += event.calls if event.status != "skipped" else 0
    verdict = ("ok", tally(made, "call")) if made else ("skipped", "no check calls the kernel")
    return SanitizerRun(Line("+".join(names), *verdict))


def _await_threads() -> None:
    """Wait for a tool's threads, which end late on a busy machine: ThreadSanitizer ignores the memory of a process forked beside one."""
    deadline = monotonic() + 20
    while len(os.listdir("/proc/self/task")) > 2 and monotonic() < deadline:  # this thread, and the sanitizer's own
        sleep(0.01)


def chosen(names: Sequence[str], only: Sequence[str]) -> list[Check]:
    """The checks that run under sanitizers: those that call the op, and one for each sanitizer that reports at the end."""
    checks: list[Check] = []
    if {"address", "undefined"} & set(names):
        checks += [check for check in CHECKS if not only or check.name in only]
    if "leak" in names:
        checks.append(Check("leak", "All memory is freed or in use", _leaks, timeout_factor=30))
    if "thread" in names:
        checks.append(Check("thread", "No two threads use memory at once, one of them to write", _races, timeout_factor=30))
    return checks


def _races(op: Op, device: str) -> str:
    """Races between the parts of one call, whose threads the instrumented kernel starts itself, and between calls."""
    torch.set_num_threads(1)  # gcc's OpenMP is not instrumented: its barriers would be unknown
    own = [sample for sample in samples(op, device) if sample.numel > SMALL]  # its largest, too
    calls = [*numerics.calls_in_threads(op, device), *sorted(own, key=lambda sample: sample.numel)[-1:]]
    with _report() as report, ThreadPoolExecutor(4) as pool:
        for sample in trials(calls):
            with suppress(AssertionError, RuntimeError):
                effects(op.overload, op, sample)
                numerics.assert_same_in_threads(op, sample, pool)
        found = reports.race(report(), op.folder)
    assert found is None, found
    return "no race"


def _leaks(op: Op, device: str) -> str:
    process = ctypes.CDLL(None)
    calls = distinct_samples(op, device, 4)
    rejected = calls[0].map(lambda t: torch.zeros_like(t, dtype=torch.float8_e4m3fn))
    with _report() as report:
        for sample in trials([*calls, rejected]):
            for _ in range(3):  # a register or the stack may still point to the last
                process.__lsan_enable()
                with suppress(RuntimeError):
                    effects(op.overload, op, sample)
                process.__lsan_disable()
        process.__lsan_do_recoverable_leak_check()
        found = reports.leak(report(), op.folder)
    assert found is None, found
    return "no leak"


@contextmanager
def _report() -> Iterator[Callable[[], str]]:
    """Have the sanitizers write to a file, and give a function that reads it."""
    process = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as file:
        process.__sanitizer_set_report_fd(ctypes.c_void_p(file.fileno()))
        try:
            yield lambda: os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")
        finally:
            process.__sanitizer_set_report_fd(ctypes.c_void_p(2))


def _place(death: Death, folder: Path) -> str | None:
    """The author's place where a child died."""
    place = reports.author_line(death.stderr, folder)
    if death.late:
        return place and f"{place}: still there at the time limit"
    return reports.find(death.stderr, folder) or (place and f"{place}: the process ends here")


def _register(op: Op, library: Path) -> None:
    """In a child: make the instrumented kernel torch's, and have the op's reference and samples."""
    kernel = ctypes.CDLL(str(library))
    if kernel.opjit_register() != 0:
        raise AssertionError("torch did not accept the instrumented kernel")
    if hasattr(kernel, "opjit_race"):
        with _report() as report:
            kernel.opjit_race()
            assert "data race" in report(), "ThreadSanitizer does not see a race made for it: this run proves nothing"
    _ = op.reference_function, samples(op, "cpu")
    process = ctypes.CDLL(None)  # a kernel that calls exit() shows its place, and ends: torch's own handlers may wait for ever here
    process.__cxa_atexit(process._exit, 1, None)
    process.__cxa_atexit(process.__sanitizer_print_stack_trace, None, None)


def _answer_line(question: dict[str, Any], names: Sequence[str], limits: Limits, replies: IO[str], folder: Path) -> None:
    try:
        sanitize.need_declaration(Path(question["folder"]))
        registry.add_path(question["folder"])
        op = registry.find(question["op"])
        found = _answer(op, names, question["only"], question["number"], limits,
                        folder / f"{op.qualified.replace('::', '.')}-{'-'.join(names)}")
    except Skipped as reason:
        found = SanitizerRun(Line("+".join(names), "skipped", str(reason)))
    except Exception as error:
        found = SanitizerRun(Line("+".join(names), "failed", str(error)))
    print(json.dumps(found), file=replies, flush=True)


def main(text: str, seconds: str, scratch: str) -> None:
    """The process: a question on stdin, an answer on stdout, each a line of JSON."""
    os.environ.pop("LD_PRELOAD")  # compilers need no sanitizer
    compare.import_all()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for question in sys.stdin:
        _answer_line(json.loads(question), text.split(","), Limits(float(seconds), signal.SIGABRT), replies, Path(scratch))


"""A process that runs samples under gcc's sanitizers, which it loads at its start.

For each op, it compiles the kernel for them and runs the checks in children. torch is not
instrumented: its allocations are checked, but not its mixture of new and free.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep

import torch

from opjit.catalog import registry
from opjit.operators.op import Op
from opjit.progress import tally
from opjit.recipe import compilers, toolchain
from opjit.testing import compare, numerics, sanitize
from opjit.testing.checks import BUILD, Check, Death, Line, add, outcome_of
from opjit.testing.isolation import supervise
from opjit.testing.samples import (
    SMALL,
    Skipped,
    declared_samples,
    distinct_samples,
    large_samples,
    repeated_samples,
    results_of,
    trials,
)

_CXX = "libstdc++.so.6"  # must be loaded at the start: without its __cxa_throw, libasan aborts at torch's first exception
_LIBRARIES = {
    "address": "libasan.so",
    "undefined": "libubsan.so",
    "leak": "liblsan.so",
    "thread": "libtsan.so",
}
_OPTIONS = {
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "ASAN_OPTIONS": "alloc_dealloc_mismatch=0:detect_odr_violation=0:verify_asan_link_order=0:handle_abort=1:"
    "allocator_may_return_null=1:detect_leaks=",
    "LSAN_OPTIONS": "detect_leaks=1",
    "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=0:report_signal_unsafe=0:handle_abort=1",
}
_START = f"import sys; from {__name__} import answer_questions; answer_questions(*sys.argv[1:])"
_QUIET = f"import ctypes; ctypes.CDLL(None).__lsan_disable(); {_START}"  # what Python and torch keep is no leak of the op's
# The sanitizers that make the calls of `numerics`; the other sanitizers have a separate check.
_WITHIN_CHECKS = {"address", "undefined"}
_OWN = list[Check]()
_TIMEOUT_FACTOR = 30

# What sanitizers write to stderr.
_ASAN = r"ERROR: \w+Sanitizer: (?:attempting )?(?P<kind>[\w-]+)"
_ACCESS = r"^(?P<what>(?:READ|WRITE) of size \d+)| caused by a (?P<signal>READ|WRITE) memory"
_REGION = r"is located (?P<place>\d+ bytes (?:after|before|inside of|to the (?:right|left) of)) (?P<region>\d+-byte region)"
_UBSAN = r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: runtime error: (?P<what>.*)$"


# An op's folder and name, the checks' names, and the only call's number.
SanitizerCalls = tuple[Path, str, Sequence[str], int | None]
# What sanitizers found in an op: a line of the table, and the author's places by the samples and by the checks that show them.
SanitizerFinding = tuple[Line, dict[str, str]]


class Sanitizers(AbstractContextManager["Sanitizers"]):
    """The process, from its parent's side: for "thread", or for some of the other sanitizers.

    Raises Skipped if the compiler lacks a library for them.
    """

    def __init__(self, names: Sequence[str], seconds: float, scratch: str) -> None:
        self._name = "+".join(names)
        compiler = toolchain.require_compiler(None)
        # The check also looks for leaks.
        libraries = [_LIBRARIES[name] for name in names if name != "leak" or "address" not in names]
        queries = ([compiler.path, f"-print-file-name={library}"] for library in libraries)
        found = [compilers.run_compiler(command).stdout.strip() for command in queries]
        if not all(map(os.path.isabs, found)):
            raise Skipped(f"{compiler.path} lacks a library for -fsanitize={','.join(names)}")
        self._finding: SanitizerFinding | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._pipe, theirs = Pipe()
        code = _QUIET if "leak" in names else _START
        environment = {
            **os.environ,
            **_OPTIONS,
            "PYTHONPATH": sanitize.python_path(),
            "LD_PRELOAD": " ".join([*found, _CXX]),
            "ASAN_OPTIONS": f"{_OPTIONS['ASAN_OPTIONS']}{int('leak' in names)}",
        }
        with theirs:
            arguments = [self._name, str(seconds), scratch, str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._errors.close()

    def begin(self, op: Op, only: Sequence[str] = (), number: int | None = None) -> None:
        self._finding = None
        with suppress(BrokenPipeError):  # `finding` says why
            self._pipe.send((op.folder, op.qualified, only, number))

    def finding(self) -> SanitizerFinding:
        """What came of it, when the calls are made."""
        if self._finding is None:
            try:
                self._finding = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                self._errors.seek(0)
                printed = self._errors.read().decode(errors="replace").strip()
                said = printed.rpartition("\n")[2] or "it printed nothing"
                self._finding = (
                    Line(self._name, "skipped", f"Python does not run under them: {said}"),
                    {},
                )
        return self._finding

    def place(self, line: Line) -> str:
        """Return the position of a kernel that died: in the same sample under the sanitizers or, if it ran through, in the same check.

        Empty without one.
        """
        places = self.finding()[1]
        return (line.death and places.get(line.death.sample)) or places.get(line.name, "")


def chosen(names: Sequence[str], only: Sequence[str]) -> list[Check]:
    """Return the checks that run under sanitizers: the checks that call the op, and one for each
    sanitizer that reports at the end.
    """
    within = numerics.CHECKS if _WITHIN_CHECKS & set(names) else []
    wanted = [check for check in within if not only or check.name in only]
    return [*wanted, *(check for check in _OWN if check.name in names)]


def answer_questions(name: str, seconds: str, scratch: str, pipe: str) -> None:
    """The process: answers questions until its parent ends it."""
    os.environ.pop("LD_PRELOAD")  # compilers need no sanitizer
    compare.import_all()
    questions = Connection(int(pipe))
    while True:
        question = questions.recv()
        places = dict[str, str]()
        line = outcome_of(
            name, partial(_answer, question, name, float(seconds), Path(scratch), places)
        )
        questions.send((line, places))


def _answer(
    question: SanitizerCalls, name: str, seconds: float, scratch: Path, places: dict[str, str]
) -> str:
    """Run an op's checks, and note the author's places where children died. Returns the note of a success."""
    place, qualified, only, number = question
    sanitize.need_declaration(place)
    registry.add_path(place)
    op = registry.find(qualified)
    names = name.split("+")
    library = sanitize.instrumented(
        op, names, toolchain.require_compiler(None).path, Path(tempfile.mkdtemp(dir=scratch))
    )
    # A tool's threads end late on a busy machine: ThreadSanitizer ignores the memory of a process
    # that was forked next to it.
    deadline = monotonic() + 20
    while (
        len(os.listdir("/proc/self/task")) > 2 and monotonic() < deadline
    ):  # this thread, and the thread of the sanitizer
        sleep(0.01)
    failures = []
    ran = 0
    prepare = partial(_register, op, library)
    number = number if _WITHIN_CHECKS.issuperset(names) else None
    for line in supervise(op, "cpu", chosen(names, only), seconds, prepare, number):
        death = line.death
        if death:
            where = _place(death, op.folder)
            failures.append(f"{where or death.how} on ({death.sample}) in {line.name}")
            if where:
                places.setdefault(death.sample, where)
                places.setdefault(line.name, where)
        elif line.status == "failed" and line.name in (BUILD, *names):
            failures.append(line.note)
        ran += line.status != "skipped"
    assert not failures, failures[0]
    if not ran:
        raise Skipped("no check calls the kernel")
    return tally(ran, "check")


def _place(death: Death, folder: Path) -> str | None:
    """The author's place where a child died."""
    place = _author_line(death.stderr, folder)
    if death.late:
        return place and f"{place}: still there at the time limit"
    return _error(death.stderr, folder) or (place and f"{place}: the process ends here")


def _register(op: Op, library: Path) -> None:
    """In a child: make the instrumented kernel torch's, and have the op's reference and samples."""
    kernel = ctypes.CDLL(str(library))
    if kernel.opjit_register() != 0:
        raise AssertionError("torch did not accept the instrumented kernel")
    if hasattr(kernel, "opjit_race"):
        with _report() as report:
            kernel.opjit_race()
            assert "data race" in report(), (
                "ThreadSanitizer does not see a race made for it: this run proves nothing"
            )
    declared_samples(op, "cpu")
    # A kernel that calls exit() shows its line, and ends: the handlers of torch may wait forever here.
    process = ctypes.CDLL(None)
    process.__cxa_atexit(process._exit, 1, None)
    process.__cxa_atexit(process.__sanitizer_print_stack_trace, None, None)


@add(_OWN, "thread", _TIMEOUT_FACTOR)
def _races(op: Op, device: str) -> str:
    """No two threads use memory at the same time, one of them to write: parts of one call, whose
    threads the instrumented kernel starts, or calls.
    """
    torch.set_num_threads(1)  # gcc's OpenMP is not instrumented: its barriers would be unknown
    calls = [*distinct_samples(op, device, 4), *large_samples(op, device)[:2]]
    declared = [sample for sample in op.samples_on(device) if sample.numel > SMALL]
    if declared:
        calls.append(max(declared, key=lambda sample: sample.numel))
    with _report() as report, ThreadPoolExecutor(4) as pool:
        for sample in trials(calls):
            with suppress(AssertionError, RuntimeError):
                results_of(op, sample)
                numerics.assert_same_in_threads(op, sample, pool)
        found = _race(report(), op.folder)
    assert found is None, found
    return "no race"


@add(_OWN, "leak", _TIMEOUT_FACTOR)
def _leaks(op: Op, device: str) -> str:
    """All memory is freed or in use."""
    process = ctypes.CDLL(None)
    with _report() as report:
        for sample in trials(repeated_samples(op, device)):
            for _ in range(3):  # a register or the stack may still point to the last
                process.__lsan_enable()
                with suppress(RuntimeError):
                    results_of(op, sample)
                process.__lsan_disable()
        process.__lsan_do_recoverable_leak_check()
        found = _leak(report(), op.folder)
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


def _error(text: str, folder: Path) -> str | None:
    """A report's error, as ``scale.c:12: heap-buffer-overflow, WRITE of size 4``, at the op's
    innermost position.

    None without a report.
    """
    undefined = re.search(_UBSAN, text, flags=re.MULTILINE)
    address = re.search(_ASAN, text)
    if undefined and (address is None or undefined.start() < address.start()):
        return f"{undefined['file'].removeprefix(f'{folder}/')}:{undefined['line']}: {undefined['what']}"
    if address is None:
        return None
    access = re.search(_ACCESS, text, flags=re.MULTILINE)
    region = re.search(_REGION, text)
    place = _author_line(text, folder)
    parts = [address["kind"] if address["kind"] != "ABRT" else "abort"]
    if access:
        parts.append(access["what"] or access["signal"])
    if region:
        parts.append(f"{region['place']} a {region['region']}")
    return f"{f'{place}: ' if place else ''}{', '.join(parts)}"


def _race(text: str, folder: Path) -> str | None:
    """The first data race of ThreadSanitizer's reports between two places in the op's folder."""
    for block in text.split("WARNING: ThreadSanitizer: data race")[1:]:
        accesses = re.split(
            r"^  (?=(?:Previous )?(?:atomic )?(?:[Ww]rite|[Rr]ead) of size)",
            block,
            flags=re.MULTILINE,
        )[1:3]
        places = [_author_line(access, folder) for access in accesses]
        if len(places) == 2 and all(places):
            return f"{places[0]}: data race, {accesses[0].split(' at ')[0].lower()}, with {places[1]} in another thread"
    return None


def _leak(text: str, folder: Path) -> str | None:
    """The first leak of LeakSanitizer's report that the op's folder allocated."""
    for block in re.split(r"^(?=(?:Direct|Indirect) leak of)", text, flags=re.MULTILINE)[1:]:
        place = _author_line(block, folder)
        if place:
            return f"{place}: {block.splitlines()[0].removesuffix(' allocated from:').lower()}"
    return None


def _author_line(text: str, folder: Path) -> str | None:
    """The innermost place of a stack trace that is in the op's folder, such as ``scale.c:12``."""
    place = re.search(rf"^ *#\d+ .*?{re.escape(str(folder))}/([^\s:]+):(\d+)", text, re.MULTILINE)
    return f"{place[1]}:{place[2]}" if place else None

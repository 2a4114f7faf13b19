"""``opjit test``: a table for each op and device, and the verdict."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import click
from click import echo

from opjit import backends, request, testing, wanted
from opjit.author import diagnostics, report
from opjit.catalog import arguments
from opjit.emulate import build
from opjit.emulate import checks as emulated
from opjit.errors import BadSetting, CompileError, OpjitError
from opjit.operators.op import Op
from opjit.progress import tally
from opjit.testing import compare, integration, sanitize, sanitized
from opjit.testing.checks import BUILD, Check, Line, outcome_of
from opjit.testing.isolation import apart, supervise
from opjit.testing.samples import Skipped
from opjit.testing.sanitized import Sanitizers

_INDENT = " " * 30
_COLORS = {"failed": "red", "ok": "green", "skipped": "cyan"}  # in the verdict's order
_CLEAR = "\r\x1b[K"  # removes the terminal's last line
_TIMED = 0.1  # seconds from which a check's time is shown
_SHOWN = 2  # failures of one cause
_EMULATED = "emulated on the CPU: results, races and bounds; no timing"


class Options(NamedTuple):
    """What to run.

    Attributes:
        device: the device to test on; None tests on every device here for which an op has a kernel.
        sanitizers: the names of the sanitizers that make the same calls.
        only: the names of the checks to run; empty runs them all.
        sample: the number of the only call to make.
        seconds: the time limit for one call of a check.
        demanded: whether a sanitizer that does not run is a failure.
        fail_fast: whether the first failure ends the run.
        last_failed: whether only the checks that failed in the last run are run.
        emulated: whether CUDA kernels run on the CPU; see `opjit.emulate`.
    """

    device: str | None = None
    sanitizers: Sequence[str] = ("address", "undefined")
    only: Sequence[str] = ()
    sample: int | None = None
    seconds: float = 10.0
    demanded: bool = False
    fail_fast: bool = False
    last_failed: bool = False
    emulated: bool = False

    def checks(self, device: str) -> list[Check]:
        """Return the chosen checks that apply to a device.

        Raises BadSetting if a name is unknown, or if its check needs an emulated kernel.
        """
        known = {
            check.name: check for check in (*testing.CHECKS, *testing.OPTIONAL, *emulated.CHECKS)
        }
        for name in self.only:
            if name not in known:
                raise BadSetting(
                    f"there is no check {name!r}; use {', '.join(known)}; the sanitizers of --sanitize repeat the calls of these checks"
                )
            if known[name] in emulated.CHECKS and not self.emulated:
                raise BadSetting(
                    f"the check {name!r} needs --emulate, because it runs a CUDA kernel on the CPU"
                )
            device_of = known[name].device
            lacks = backends.for_device(device_of).available() if device_of else None
            if lacks or (device_of and (self.emulated or self.device not in (None, device_of))):
                told = lacks or f"leave out --emulate, and use --device {device_of}"
                raise BadSetting(f"the check {name!r} runs on {device_of} only: {told}")
        if self.sample is not None and len(self.only) != 1:
            raise BadSetting(
                "--sample N needs --only CHECK, because calls are numbered for each check"
            )

        left_out = [] if self.emulated else emulated.CHECKS
        return [
            check
            for name, check in known.items()
            if (name in self.only if self.only else check not in testing.OPTIONAL)
            if check.device in (None, device) and check not in left_out
        ]


def run_checks(names: Sequence[str], options: Options) -> tuple[list[Line], int]:
    """Print the warnings of -Wall -Wextra, unless checks were chosen, and a table for each op and device of the named ops or folders.

    Returns the table's lines, and the exit code: 1 if a check failed, or if an op or a check that was asked for made no call.
    """
    # A process that queries CUDA, instead of NVML, cannot fork children that use CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Tuning for the many sizes of checks would be slow, and "results" tests each variant.
    os.environ["OPJIT_TUNE"] = "0"
    _import_for(options.checks("cpu"))
    declared = {name: _declared(name, alone=len(names) == 1) for name in names}
    ops = [op for found in declared.values() if not isinstance(found, str) for op in found]
    if not options.only and not options.emulated:
        apart(partial(diagnostics.show_all_warnings, ops, options.device))

    with ExitStack() as stack:
        table = _Table(options, _sanitizers(options, stack))
        _test_all(table, declared)
        if table.last_failed is not None and not table.results:
            echo("no check failed in the last run, so all are run")
            table.last_failed = None
            _test_all(table, declared)
        code = table.end()

    if options.sample is None:
        report.keep_failed(table.results)
    return table.results, code


def _test_all(table: _Table, declared: dict[str, list[Op] | str]) -> None:
    for name, found in declared.items():
        if isinstance(found, str):
            table.begin(name)
            table.add(Line("declaration", "failed", found))
            continue
        for op in found:
            _test_on_devices(table, op, name)


def _test_on_devices(table: _Table, op: Op, name: str) -> None:
    """Test an op on the chosen devices. `name` is the op's or a folder's, which may hold folders of ops."""
    inner = os.path.join(name, op.folder.name)
    name = inner if os.path.isdir(inner) else name
    options = table.options
    if options.emulated:
        table.emulate(op, name)
        return
    devices = [options.device] if options.device else op.devices()
    for device in devices:
        table.test(op, device, name)
    if options.device is None and "cuda" in op.backends() and "cuda" not in devices:
        table.compile(op)
    elif not devices and table.last_failed is None:
        table.begin(op.qualified)
        table.add(Line(BUILD, "skipped", arguments.without_device(op)))


def show_op(op: Op, device: str) -> None:
    """Print the table of an op that no file declares, such as a notebook's, and the verdict; without sanitizers, which need an op.py."""
    table = _Table(Options(sanitizers=()), [])
    _import_for(table.options.checks(device))
    table.test(op, device, "")
    table.end()


def _import_for(checks: Sequence[Check]) -> None:
    """Import the modules that checks need, so that the import is not part of a call's time.

    Each child would need 1.5 s for the last two.
    """
    compare.import_all()
    if any(check in integration.CHECKS for check in checks):
        import torch._dynamo
        import torch._export  # noqa: F401


def _declared(name: str, alone: bool) -> list[Op] | str:
    """Return the ops of a name or folder, or the reason why nothing was found.

    If it is the only argument, raise the reason.
    """
    try:
        return arguments.ops(name)
    except Exception as error:
        if alone:
            raise
        known = isinstance(error, OpjitError)
        return str(error) if known else f"op.py raised {type(error).__name__}: {error}"


def _sanitizers(options: Options, stack: ExitStack) -> list[Sanitizers | Line]:
    """Return the processes of gcc's sanitizers, or the reason why they cannot run.

    The thread sanitizer goes with no other.
    """
    found = list[Sanitizers | Line]()
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="opjit-"))
    of_c = options.sanitizers if options.device in (None, "cpu") else ()
    names = {*of_c} & {*sanitize.FOR_C}
    for group in (sorted(names - {"thread"}), sorted(names & {"thread"})):
        if sanitized.chosen(group, options.only):
            try:
                found.append(stack.enter_context(Sanitizers(group, options.seconds, scratch)))
            except (Skipped, OpjitError) as reason:
                found.append(Line("+".join(group), "skipped", str(reason)))
    return found


class _Table:
    """Prints the lines of a run while they come, and keeps them."""

    def __init__(self, options: Options, sanitizers: Sequence[Sanitizers | Line]) -> None:
        self.options = options
        self.sanitizers = sanitizers
        self.results = list[Line]()
        self._subject = ""
        self._ran: set[str] = set()  # sanitizers
        self._remarks: set[str] = set()  # of the verdict
        self._causes: dict[str, list[str]] = {}  # the checks that failed, by the cause
        self.last_failed = report.last_failed() if options.last_failed else None
        self.stopped = False  # by --fail-fast

    def begin(self, title: str) -> None:
        echo(title)
        self._subject = title
        self._causes.clear()

    def test(self, op: Op, device: str, name: str) -> None:
        """Run the checks of an op on a device, while sanitizers make the same calls.

        `name` is the op's part of the command; empty if the command does not have one.
        """
        title = f"{op.qualified} on {device}"
        checks = self._chosen(title, device)
        if self.stopped or not checks:
            return
        self.begin(title)
        asked = list[Sanitizers]()
        for each in self.sanitizers if device == "cpu" else ():
            if isinstance(each, Line):
                self.add(each)
            else:
                each.begin(op, self.options.only, self.options.sample)
                asked.append(each)
        built = True
        waiting = list(checks)
        _announce(waiting)
        prepare = partial(testing.prepare, op, device)
        for line in supervise(
            op, device, checks, self.options.seconds, prepare, self.options.sample
        ):
            _announce()
            place = asked[0].place(line) if asked and line.death else ""
            self.add(line, place, _repeating(name, line, device))
            if self.stopped:
                return
            built = built and line.name != BUILD
            waiting = [check for check in waiting if check.name != line.name]
            _announce(waiting)
        _announce()
        self._add_sanitizers(op, device, asked, built)
        self._summarize_causes()

    def _chosen(self, title: str, device: str) -> list[Check]:
        """Return the checks to run on a device, with --last-failed only the checks that failed
        there.
        """
        checks = self.options.checks(device)
        if self.last_failed is None:
            return checks
        failed = self.last_failed.get(title, [])
        return [check for check in checks if check.name in failed]

    def _add_sanitizers(self, op: Op, device: str, asked: list[Sanitizers], built: bool) -> None:
        """Wait for the sanitizers' findings, which come in the order of questions, and add them if the op was built."""
        found = [each.finding()[0] for each in asked]
        of_cuda = self.options.sanitizers if device == "cuda" and built else ()
        found += [
            outcome_of(each, partial(sanitize.sanitize_op, op, each))
            for each in of_cuda
            if each in sanitize.FOR_CUDA
        ]
        for line in found:
            if line.status != "skipped":
                self._ran.update(line.name.split("+"))
            if built:
                self.add(line)

    def _summarize_causes(self) -> None:
        """Name the checks that failed for a cause which was shown already."""
        for first, *others in self._causes.values():
            more = others[_SHOWN - 1 :]
            if more:
                note = f"the same in {tally(len(more), 'other check')} as in {first}"
                self._print("failed", f"{len(more)} more", note, ", ".join(more))

    def emulate(self, op: Op, name: str) -> None:
        """Run the checks of an op's CUDA kernel on the CPU. Each line reports that, because no line is a run on a GPU."""
        title = f"{op.qualified} on cuda, {_EMULATED}"
        checks = self._chosen(title, "cpu")
        if self.stopped or not checks:
            return
        build.warn_of_mistakes(op)
        self.begin(title)
        built = outcome_of(BUILD, partial(emulated.compile_both, op))
        if built.status != "ok":
            self.add(built)
            return
        self._remarks.add("CUDA emulated and not run on a GPU")
        for checked in (True, False):
            part = [check for check in checks if (check in emulated.CHECKS) is checked]
            prepare = partial(emulated.prepare, op, checked)
            for line in supervise(
                op, "cpu", part, self.options.seconds, prepare, self.options.sample
            ):
                command = _repeating(name, line, "cuda")
                note = re.sub(r"^RuntimeError: \S+ emulated: ", "", line.note)
                shown = replace(line, note=f"emulated: {note}")
                self.add(shown, command=f"{command} --emulate" if command else "")
                if self.stopped:
                    return
        self._summarize_causes()

    def compile(self, op: Op) -> None:
        """Compile an op's CUDA kernel for OPJIT_ARCH, or for sm_90 without it, because this
        machine lacks a GPU.
        """
        title = f"{op.qualified} on cuda"
        if self.stopped or title not in (self.last_failed or [title]):
            return
        self.begin(title)
        arch = os.environ.get("OPJIT_ARCH", "")
        known = backends.for_device("cuda").takes(arch)
        try:
            target = wanted.target_of(None, arch if known else "sm_90")
            request.entry(op, target)
        except OpjitError as error:
            status = "failed" if isinstance(error, CompileError) else "skipped"
            self.add(Line(BUILD, status, str(error)))
            return
        note = f"compiled for {target.arch}, but not run without a GPU; use --emulate to run it on the CPU"
        self.add(Line(BUILD, "ok", note))
        self._remarks.add("CUDA compiled and not run")

    def add(self, line: Line, place: str = "", command: str = "") -> None:
        """Keep and print a line, and below it the author's line and the command that repeats the call.

        If the cause of a failure was shown twice, the failure is not printed.
        """
        self.results.append(replace(line, subject=self._subject, place=place, command=command))
        shown = 1
        if line.status == "failed":
            self.stopped = self.options.fail_fast
            cause = place or re.sub(r" on \((?:[^()]|\([^()]*\))*\)(?: in [\w ]+$)?", "", line.note)
            names = self._causes.setdefault(cause, [])
            names.append(line.name)
            shown = len(names)
        if shown <= _SHOWN:
            time = f" ({line.seconds:.1f} s)" if line.seconds >= _TIMED else ""
            self._print(line.status, line.name, line.note + time, place, command)

    def _print(self, status: str, name: str, *below: str) -> None:
        lines = [part for text in below for part in text.splitlines()]
        text = f"\n{_INDENT}".join(lines)
        echo(f"  {click.style(f'{status:<8}', _COLORS[status])} {name:<18} {text}".rstrip())

    def end(self) -> int:
        """Add a failure for each sanitizer that was asked for and has not run, print the verdict, and return the exit code."""
        if self.options.demanded and not self.stopped:
            for name in self.options.sanitizers:
                of_c = name in sanitize.FOR_C
                kind = "C kernels on the CPU" if of_c else "CUDA kernels on a GPU"
                note = f"this sanitizer was asked for and has not run; it is for {kind}"
                if name not in self._ran:
                    self.add(Line(name, "failed", note))

        counts = Counter(line.status for line in self.results)
        verdict = [f"{counts[status]} {status}" for status in _COLORS if counts[status]]
        untested = self._untested()
        if not counts["failed"] and (untested or not self.results):
            verdict.append(f"nothing was tested: {', '.join(untested)}".rstrip(": "))
        verdict += self._remarks
        if self.stopped:
            verdict.append("stopped at the first failure")
        echo(", ".join(verdict))
        return int(bool(counts["failed"] or untested or not self.results))

    def _untested(self) -> list[str]:
        """Return the checks of --only, or without it the ops, that made no call."""
        ops = set[str]()
        tested = set[str]()
        for line in self.results:
            op = line.subject.partition(" on ")[0]
            ops.add(op)
            if line.status == "failed" or (line.status == "ok" and line.name != BUILD):
                tested |= {line.name, op}
        return sorted(({*self.options.only} or ops) - tested)


def _announce(waiting: Sequence[Check] = ()) -> None:
    """Replace a terminal's last line by the name of the running check, the first that waits, if there is one."""
    if sys.stdout.isatty():
        echo(_CLEAR + "".join(f"  running  {check}" for check in waiting[:1]), nl=False)


def _repeating(name: str, line: Line, device: str) -> str:
    """The command that repeats a check's failed call."""
    if not name or line.status != "failed" or line.name == BUILD:
        return ""
    number = "" if line.number is None else f" --sample {line.number}"
    where = "" if device == "cpu" else f" --device {device}"
    return f"opjit test {shlex.quote(name)} --only {shlex.quote(line.name)}{number}{where}"

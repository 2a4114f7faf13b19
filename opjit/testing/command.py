"""``opjit test``: a table for each op and device, and the verdict."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import click

from opjit import backends, request, testing, wanted
from opjit.declare import arguments
from opjit.declare.op import Op
from opjit.errors import BadSetting, CompileError, DeclarationError, OpjitError
from opjit.testing import compare, integration, sanitize, sanitized
from opjit.testing.checks import Check, Line
from opjit.testing.isolation import Death, Limits, supervise
from opjit.testing.samples import Skipped, samples
from opjit.testing.sanitized import Sanitizers

_INDENT = " " * 30
_COLOURS = {"ok": "green", "skipped": "cyan", "waived": "yellow", "failed": "red"}
_ARCH = "sm_90"
_SHOWN = 2  # failures of one cause
_SAMPLE = re.compile(r" on \((?:[^()]|\([^()]*\))*\)(?: in [\w ]+$)?")


class Options(NamedTuple):
    """What to run.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``; None is every device here for which an op has a kernel.
        sanitizers: such as ``"address"`` or ``"memcheck"``; each applies to its own kind of device.
        only: names of checks; none is all of them.
        sample: the number of the only call to make, of the only check.
        seconds: the time limit for one call of a check.
        demanded: whether it is a failure that a sanitizer does not run.
    """

    device: str | None = None
    sanitizers: Sequence[str] = ("address", "undefined")
    only: Sequence[str] = ()
    sample: int | None = None
    seconds: float = 10.0
    demanded: bool = False

    def checks(self, device: str) -> list[Check]:
        """The chosen checks that apply to a device.

        Raises:
            BadSetting: there is no check of a name.
        """
        names = [check.name for check in testing.CHECKS]
        for name in self.only:
            if name not in names:
                raise BadSetting(f"there is no check {name!r}; use {', '.join(names)}")
        if self.sample is not None and len(self.only) != 1:
            raise BadSetting("--sample counts the calls of one check; name it with --only")
        return [check for check in testing.CHECKS if check.device in (None, device) and (not self.only or check.name in self.only)]


def run(names: Sequence[str], options: Options, before: Callable[[list[Op]], object] = lambda ops: None) -> int:
    """Print a table for each op and device. Returns the command's exit code: 1 if a check failed or none ran.

    Args:
        names: names of ops, or paths of their folders. One that cannot be declared is a failure, and the others are tested.
        before: is called first, with all ops.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a process that asks CUDA itself cannot fork children that use it
    compare.import_all()
    if any(check in integration.CHECKS for check in options.checks("cpu")):
        import torch._dynamo
        import torch._export  # noqa: F401 - children would take 1.5 s for these, each
    table = _Table(options)
    declared = {name: _declared(name, alone=len(names) == 1) for name in names}
    before([op for found in declared.values() if not isinstance(found, str) for op in found])
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="opjit-"))
        for name, found in declared.items():
            if isinstance(found, str):
                click.echo(name)
                table.add(Line("declaration", "failed", found), "", "cpu")
                continue
            for op in found:
                devices, kernels = [options.device] if options.device else op.devices(), op.backends()
                inner = os.path.join(name, op.folder.name)  # the argument may be a folder of op folders
                for device in devices:
                    table.test(op, device, inner if os.path.isdir(inner) else name, stack, scratch)
                if options.device is None and "cuda" in kernels and "cuda" not in devices:
                    table.compile(op)
                elif not devices:
                    print(f"{op.qualified} runs on no device of this machine: it has kernels for {' and '.join(kernels) or 'nothing'}")
        table.complain_of_idle_sanitizers()
    print(table.verdict())
    return 1 if table.counts["failed"] or not table.counts["ok"] else 0


def _declared(name: str, alone: bool) -> list[Op] | str:
    """The ops of a name or folder, or why there are none; alone, it raises that."""
    try:
        return arguments.ops(name)
    except Exception as error:
        if alone:
            raise
        return str(error) if isinstance(error, OpjitError) else f"op.py raised {type(error).__name__}: {error}"


def report(op: Op, device: str) -> None:
    """Print the table of an op that no file declares, such as a notebook's, and the verdict. Sanitizers, which run the op in a Python of
    their own, have no part in it."""
    table = _Table(Options(sanitizers=()))
    with ExitStack() as stack:
        table.test(op, device, "", stack, "")
    print(table.verdict())


class _Table:
    """The lines of a run, and their counts by status."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self.remarks: list[str] = []
        self.ran: set[str] = set()  # sanitizers
        self._sanitizers: list[Sanitizers | Line] | None = None

    def test(self, op: Op, device: str, name: str, stack: ExitStack, scratch: str) -> None:
        """Run the checks of an op on a device, while sanitizers make the same calls in a process of their own."""
        click.echo(f"{op.qualified} on {device}")
        asked: list[Sanitizers] = []
        for started in self._start(stack, scratch) if device == "cpu" else []:
            if isinstance(started, Line):
                self.add(started, name, device)
            else:
                started.begin(op, self.options.only, self.options.sample)
                asked.append(started)
        failures, built = _Failures(), True
        for event in supervise(op, device, self.options.checks(device), Limits(self.options.seconds), partial(_prepare, op, device),
                               self.options.sample):
            line, report = event.line() if isinstance(event, Death) else event, None
            if isinstance(event, Death) and asked:
                report = asked[0].report(event)
            built = built and line.name != "build"
            if failures.is_new(line, report):
                self.add(line, name, device, report)
        found = [each.finding().line for each in asked]  # also where they are not shown: the process answers in the order of questions
        if device == "cuda" and built:
            found += sanitize.lines(op, [each for each in self.options.sanitizers if each in sanitize.FOR_CUDA])
        self.ran.update(part for line in found if line.status != "skipped" for part in line.name.split("+"))
        for line in found if built else []:
            if failures.is_new(line, None):
                self.add(line, name, device)
        for line in failures.rest():
            self.counts[line.status] += int(line.name.split()[0]) - 1
            self.add(line, "", device)

    def compile(self, op: Op) -> None:
        """Compile the CUDA kernel of an op, as no GPU is here."""
        click.echo(f"{op.qualified} on cuda")
        line = _compiled(op)
        self.add(line, "", "cuda")
        self.remarks += ["CUDA compiled and not run"] if line.status == "ok" else []

    def add(self, line: Line, name: str, device: str, report: str | None = None) -> None:
        """Print a line, below it the sanitizers' report, and the command that repeats the call of an op with a name."""
        self.counts[line.status] += 1
        status = click.style(f"{line.status:<8}", _COLOURS[line.status])
        click.echo(f"  {status} {line.name:<18} {_hung(line.note)}".rstrip())
        if report:
            click.echo(f"{_INDENT}{_hung(report)}")
        if name and line.status == "failed" and any(line.name == check.name for check in testing.CHECKS):
            number = "" if line.number is None else f" --sample {line.number}"
            where = "" if device == "cpu" else f" --device {device}"
            click.echo(f"{_INDENT}opjit test {shlex.quote(name)} --only {shlex.quote(line.name)}{number}{where}")

    def complain_of_idle_sanitizers(self) -> None:
        """Add a failure for each sanitizer that was asked for and has not run."""
        for name in self.options.sanitizers if self.options.demanded else ():
            if name not in self.ran:
                kind = "C kernels on the CPU" if name in sanitize.FOR_C else "CUDA kernels on a GPU"
                checks = f", in the checks {', '.join(map(str, sanitized.CHECKS))}" if name in ("address", "undefined") else ""
                self.add(Line(name, "failed", f"this sanitizer was asked for and has not run; it is for {kind}{checks}"), "", "cpu")

    def verdict(self) -> str:
        counted = [f"{self.counts[status]} {status}" for status in ("failed", "ok", "waived", "skipped") if self.counts[status]]
        return ", ".join([*counted, *dict.fromkeys(self.remarks)]) if counted else "nothing was checked"

    def _start(self, stack: ExitStack, scratch: str) -> list[Sanitizers | Line]:
        """The processes of gcc's sanitizers, started once; or why there is none. The thread sanitizer goes with no other."""
        names = [each for each in self.options.sanitizers if each in sanitize.FOR_C]
        if self._sanitizers is None:
            self._sanitizers = []
            for group in ([each for each in names if each != "thread"], [each for each in names if each == "thread"]):
                if sanitized.chosen(group, self.options.only):
                    try:
                        self._sanitizers.append(stack.enter_context(Sanitizers(group, self.options.seconds, scratch)))
                    except (Skipped, OpjitError) as reason:
                        self._sanitizers.append(Line("+".join(group), "skipped", str(reason)))
        return self._sanitizers


def _hung(text: str) -> str:
    """The lines of a note below each other in its column, and wrapped there on a terminal."""
    width = shutil.get_terminal_size().columns - len(_INDENT)
    lines = text.splitlines()
    if sys.stdout.isatty() and width >= len(_INDENT):
        lines = [part for line in lines for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]]
    return f"\n{_INDENT}".join(lines)


class _Failures:
    """The failures of an op by their causes: from the third of one cause on, only their checks' names are shown."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def is_new(self, line: Line, report: str | None) -> bool:
        """Whether to show a line of the table; counts failures."""
        if line.status != "failed":
            return True
        names = self._names.setdefault(report or _SAMPLE.sub("", line.note), [])
        names.append(line.name)
        return len(names) <= _SHOWN

    def rest(self) -> Iterator[Line]:
        for cause, names in self._names.items():
            more = names[_SHOWN:]
            if more:
                yield Line(f"{len(more)} more", "failed", f"the same in {', '.join(more)}: {cause}")


def _prepare(op: Op, device: str) -> None:
    """In a child: build the op, unless it is built, and have its reference and samples."""
    request.ready(op, backends.for_device(device))
    _ = op.reference_function, samples(op, device)
    unknown = set(op.waived) - {check.name for check in testing.CHECKS}
    if unknown:
        known = ", ".join(map(str, testing.CHECKS))
        raise DeclarationError(f"{op.qualified} waives {unknown.pop()!r}, which is no check; there are {known}")


def _compiled(op: Op) -> Line:
    """Compile the CUDA kernel for OPJIT_ARCH, else for a GPU of today."""
    cuda, override = backends.for_device("cuda"), os.environ.get("OPJIT_ARCH", "")
    try:
        target = wanted.target_of(None, override if cuda.takes(override) else _ARCH)
        request.entry(op, target)
    except CompileError as error:
        return Line("build", "failed", str(error))
    except OpjitError as error:
        return Line("build", "skipped", str(error))
    return Line("build", "ok", f"compiled for {target.arch} and not run, as no GPU is here")

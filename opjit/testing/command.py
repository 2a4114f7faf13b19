"""``opjit test``: a table for each op and device, and the verdict."""

import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import click

from opjit import backends, request, testing, wanted
from opjit.declare import arguments
from opjit.declare.op import Op
from opjit.errors import BadSetting, CompileError, OpjitError
from opjit.testing import compare, integration, sanitize, sanitized
from opjit.testing.checks import Check, Line, outcome_of, tally
from opjit.testing.isolation import Death, supervise
from opjit.testing.samples import Skipped
from opjit.testing.sanitized import Sanitizers

_INDENT = " " * 30
_COLOURS = {"ok": "green", "skipped": "cyan", "failed": "red"}
_SHOWN = 2  # failures of one cause
_SAMPLE = re.compile(r" on \((?:[^()]|\([^()]*\))*\)(?: in [\w ]+$)?")


class Options(NamedTuple):
    """What to run."""

    device: str | None = None  # every device here for which an op has a kernel
    sanitizers: Sequence[str] = ("address", "undefined")
    only: Sequence[str] = ()  # names of checks; none is all of them
    sample: int | None = None  # the number of the only call to make
    seconds: float = 10.0  # for one call of a check
    demanded: bool = False  # it is a failure that a sanitizer does not run

    def checks(self, device: str) -> list[Check]:
        """The chosen checks that apply to a device. Raises BadSetting if there is no check of a name."""
        names = [check.name for check in testing.CHECKS]
        for name in self.only:
            if name not in names:
                raise BadSetting(f"there is no check {name!r}; use {', '.join(names)}")
        if self.sample is not None and len(self.only) != 1:
            raise BadSetting("--sample counts the calls of one check; name it with --only")
        return [
            check
            for check in testing.CHECKS
            if check.device in (None, device) and (not self.only or check.name in self.only)
        ]


def run(
    names: Sequence[str], options: Options, before: Callable[[list[Op]], object] = lambda ops: None
) -> int:
    """Print a table for each op and device, of names or folders; `before` gets all ops first. Returns 1 if a check failed or none ran."""
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # a process that asks CUDA itself cannot fork children that use it
    os.environ["OPJIT_TUNE"] = (
        "0"  # the checks' many sizes are not worth a choice; "results" has each variant
    )
    _import_for(options.checks("cpu"))
    declared = {name: _declared(name, alone=len(names) == 1) for name in names}
    before([op for found in declared.values() if not isinstance(found, str) for op in found])
    with ExitStack() as stack:
        table = _Table(options, _sanitizers(options, stack))
        for name, found in declared.items():
            if isinstance(found, str):
                table.begin(name)
                table.add(Line("declaration", "failed", found))
                continue
            for op in found:
                devices, kernels = (
                    [options.device] if options.device else op.devices(),
                    op.backends(),
                )
                inner = os.path.join(
                    name, op.folder.name
                )  # the argument may be a folder of op folders
                for device in devices:
                    table.test(op, device, inner if os.path.isdir(inner) else name)
                if options.device is None and "cuda" in kernels and "cuda" not in devices:
                    table.compile(op)
                elif not devices:
                    print(
                        f"{op.qualified} runs on no device of this machine: it has kernels for {' and '.join(kernels) or 'nothing'}"
                    )
        table.end()
    return 1 if table.counts["failed"] or not table.counts["ok"] else 0


def report(op: Op, device: str) -> None:
    """Print the table of an op that no file declares, such as a notebook's, and the verdict; without sanitizers, which need an op.py."""
    table = _Table(Options(sanitizers=()), [])
    _import_for(table.options.checks(device))
    table.test(op, device, "")
    table.end()


def _import_for(checks: Sequence[Check]) -> None:
    """Import what checks need: no call's time counts it, and children would take 1.5 s for the last two, each."""
    compare.import_all()
    if any(check in integration.CHECKS for check in checks):
        import torch._dynamo
        import torch._export  # noqa: F401


def _declared(name: str, alone: bool) -> list[Op] | str:
    """The ops of a name or folder, or why there are none; alone, it raises that."""
    try:
        return arguments.ops(name)
    except Exception as error:
        if alone:
            raise
        return (
            str(error)
            if isinstance(error, OpjitError)
            else f"op.py raised {type(error).__name__}: {error}"
        )


def _sanitizers(options: Options, stack: ExitStack) -> list[Sanitizers | Line]:
    """The processes of gcc's sanitizers, or why there is none. The thread sanitizer goes with no other."""
    found: list[Sanitizers | Line] = []
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="opjit-"))
    names = (
        [each for each in options.sanitizers if each in sanitize.FOR_C]
        if options.device in (None, "cpu")
        else []
    )
    for group in (
        [each for each in names if each != "thread"],
        [each for each in names if each == "thread"],
    ):
        if sanitized.chosen(group, options.only):
            try:
                found.append(stack.enter_context(Sanitizers(group, options.seconds, scratch)))
            except (Skipped, OpjitError) as reason:
                found.append(Line("+".join(group), "skipped", str(reason)))
    return found


class _Table:
    """The lines of a run, and their counts by status."""

    def __init__(self, options: Options, sanitizers: Sequence[Sanitizers | Line]) -> None:
        self.options, self.sanitizers = options, sanitizers
        self.counts: Counter[str] = Counter()
        self._ran: set[str] = set()  # sanitizers
        self._compiled = False
        self._causes: dict[str, list[str]] = {}  # the checks that failed, by the cause

    def begin(self, title: str) -> None:
        click.echo(title)
        self._causes.clear()

    def test(self, op: Op, device: str, name: str) -> None:
        """Run the checks of an op on a device, while sanitizers make the same calls. `name` is the command's for the op, if it has one."""
        self.begin(f"{op.qualified} on {device}")
        asked: list[Sanitizers] = []
        for each in self.sanitizers if device == "cpu" else ():
            if isinstance(each, Line):
                self.add(each)
            else:
                each.begin(op, self.options.only, self.options.sample)
                asked.append(each)
        built, options = True, self.options
        for event in supervise(
            op,
            device,
            options.checks(device),
            options.seconds,
            partial(testing.prepare, op, device),
            options.sample,
        ):
            line = event.line() if isinstance(event, Death) else event
            place = asked[0].place(event) if asked and isinstance(event, Death) else None
            built = built and line.name != "build"
            self.add(line, place or "", _repeating(name, line, device))
        found = [
            each.finding()[0] for each in asked
        ]  # also where they are not shown: the process answers in the order of questions
        if device == "cuda" and built:
            found += [
                outcome_of(each, partial(sanitize.check, op, each))
                for each in self.options.sanitizers
                if each in sanitize.FOR_CUDA
            ]
        self._ran.update(
            part for line in found if line.status != "skipped" for part in line.name.split("+")
        )
        for line in found if built else []:
            self.add(line)
        for names in self._causes.values():
            more = names[_SHOWN:]
            if more:
                self._print(
                    "failed",
                    f"{len(more)} more",
                    f"the same in {tally(len(more), 'other check')} as in {names[0]}",
                    ", ".join(more),
                )

    def compile(self, op: Op) -> None:
        """Compile an op's CUDA kernel for OPJIT_ARCH, else for a GPU of today, as no GPU is here."""
        self.begin(f"{op.qualified} on cuda")
        cuda, override = backends.for_device("cuda"), os.environ.get("OPJIT_ARCH", "")
        try:
            target = wanted.target_of(None, override if cuda.takes(override) else "sm_90")
            request.entry(op, target)
        except OpjitError as error:
            self.add(
                Line(
                    "build", "failed" if isinstance(error, CompileError) else "skipped", str(error)
                )
            )
        else:
            self.add(
                Line("build", "ok", f"compiled for {target.arch} and not run, as no GPU is here")
            )
            self._compiled = True

    def add(self, line: Line, place: str = "", command: str = "") -> None:
        """Print a line, and below it the author's place and the command that repeats the call, unless its cause was shown twice."""
        self.counts[line.status] += 1
        names = (
            self._causes.setdefault(place or _SAMPLE.sub("", line.note), [])
            if line.status == "failed"
            else []
        )
        names.append(line.name)
        if len(names) <= _SHOWN:
            self._print(line.status, line.name, line.note, place, command)

    def _print(self, status: str, name: str, *below: str) -> None:
        text = f"\n{_INDENT}".join(part for text in below for part in text.splitlines())
        click.echo(f"  {click.style(f'{status:<8}', _COLOURS[status])} {name:<18} {text}".rstrip())

    def end(self) -> None:
        """Add a failure for each sanitizer that was asked for and has not run, and print the verdict."""
        for name in self.options.sanitizers if self.options.demanded else ():
            if name not in self._ran:
                kind = "C kernels on the CPU" if name in sanitize.FOR_C else "CUDA kernels on a GPU"
                self.add(
                    Line(
                        name,
                        "failed",
                        f"this sanitizer was asked for and has not run; it is for {kind}",
                    )
                )
        counted = [
            f"{self.counts[status]} {status}"
            for status in ("failed", "ok", "skipped")
            if self.counts[status]
        ]
        remarks = ["CUDA compiled and not run"] if self._compiled else []
        print(", ".join([*counted, *remarks]) if counted else "nothing was checked")


def _repeating(name: str, line: Line, device: str) -> str:
    """The command that repeats a check's failed call."""
    if not name or line.status != "failed" or line.name == "build":
        return ""
    number = "" if line.number is None else f" --sample {line.number}"
    where = "" if device == "cpu" else f" --device {device}"
    return f"opjit test {shlex.quote(name)} --only {shlex.quote(line.name)}{number}{where}"

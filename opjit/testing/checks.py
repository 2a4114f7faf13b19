"""A check of an op, the decorator that adds one, and its line in the table."""

import time
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from opjit.operators.op import Op
from opjit.progress import tally
from opjit.testing.samples import CallWatch, Skipped, watch

BUILD = "build"  # the line of an op that cannot be built
_LONGEST = 400  # characters of a failure's text
CheckFunction = Callable[[Op, str], str]  # accepts an op and a device, returns a note for the table


class Check(NamedTuple):
    """A check of ``opjit test``. Call it with an op and a device.

    Attributes:
        name: its name in the table.
        promise: the property that an op has if the check passes.
        run: a function of an op and a device that returns a note for the table.
        timeout_factor: the factor for the time limit of a call, for checks in which torch compiles during the call.
        device: the only device of the check. None means any device.
    """

    name: str
    promise: str
    run: CheckFunction
    timeout_factor: int = 1
    device: str | None = None

    def __call__(self, op: Op, device: str) -> str:
        """Run the check. Return its note, which ends with how many calls it made and how large they were.

        Raises:
            AssertionError: the op breaks the promise.
            Skipped: the check does not apply, or the samples gave it nothing to call.
        """
        if self.name in op.declaration.waived:
            raise Skipped(f"waived: {op.declaration.waived[self.name]}")
        if self.device not in (None, device):
            raise Skipped(f"for {self.device} only")

        before = watch.get()
        calls = CallWatch(before.say, before.only)
        watch.set(calls)
        note = self.run(op, device)
        if not calls.calls:
            raise Skipped("it made no call: no sample applies")
        if not calls.largest:
            raise Skipped(f"{tally(calls.calls, 'call')}, all without an element")
        return f"{note}; {tally(calls.calls, 'call')} of up to {tally(calls.largest, 'element')}"

    def __str__(self) -> str:
        return self.name


def add(
    checks: list[Check], name: str, timeout_factor: int = 1, device: str | None = None
) -> Callable[[CheckFunction], CheckFunction]:
    """Append the decorated function to a list of checks; its docstring is the promise."""

    def register(run: CheckFunction) -> CheckFunction:
        promise = (run.__doc__ or "").strip().rstrip(".")
        checks.append(Check(name, promise, run, timeout_factor, device))
        return run

    return register


@dataclass(frozen=True)
class Death:
    """The end of a child that ran a check: how it ended, in which sample, its last output, and whether it was ended because it was late."""

    how: str
    sample: str
    stderr: str
    late: bool


@dataclass(frozen=True)
class Line:
    """The result of a check, which is a line of the table.

    Attributes:
        name: the name of the check, or "build".
        status: ``ok``, ``failed`` or ``skipped``.
        note: the result of a check that passed, or why it failed or was skipped.
        number: the number of the failed call among the calls of the check.
        seconds: the duration of the check.
        death: the end of the process, if the check ended it.
        subject: the op and the device, ``mylib::scale on cpu``.
        place: the author's line that failed.
        command: repeats the failed call.
    """

    name: str
    status: str
    note: str
    number: int | None = None
    seconds: float = 0.0
    death: Death | None = None
    subject: str = ""
    place: str = ""
    command: str = ""

    def fields(self) -> dict[str, object]:
        """Return the attributes for JSON."""
        fields = dict(vars(self))
        del fields["death"]
        return fields


def outcome_of(name: str, run: Callable[[], str]) -> Line:
    """Run a check and return its line."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            note = run()
        status = "ok"
    except unittest.SkipTest as reason:
        note = str(reason)
        status = "skipped"
    except Exception as error:  # torch's checks raise errors of any type
        note = " ".join(str(error).split())
        if not isinstance(error, AssertionError):
            note = f"{type(error).__name__}: {note}"
        note = note if len(note) <= _LONGEST else f"{note[:_LONGEST]} …"
        status = "failed"
    return Line(name, status, note, seconds=time.monotonic() - start)

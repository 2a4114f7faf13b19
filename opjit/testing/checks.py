"""A check of an op, the decorator that adds one, and its line in the table."""

import unittest
import warnings
from collections.abc import Callable
from typing import NamedTuple

from opjit.declare.op import Op
from opjit.testing.samples import Skipped

CheckFunction = Callable[[Op, str], str]  # takes an op and a device; returns a note for the table


class Check(NamedTuple):
    """One check.

    Attributes:
        name: its name in the table.
        promise: what is true of an op that passes.
        run: takes an op and a device, and returns a note for the table.
        timeout_factor: how many times the kernel's time limit a call gets, as torch compiles in it.
        device: the only one that it applies to; None is any.
    """

    name: str
    promise: str
    run: CheckFunction
    timeout_factor: int = 1
    device: str | None = None

    def __call__(self, op: Op, device: str) -> str:
        """Run the check, and return its note.

        Raises:
            AssertionError: the op breaks the promise.
            Skipped: the check does not apply.
        """
        if self.name in op.waived:
            raise Skipped(f"waived: {op.waived[self.name]}")
        if self.device not in (None, device):
            raise Skipped(f"for {self.device} only")
        return self.run(op, device)

    def __str__(self) -> str:
        return self.name


def add(
    checks: list[Check], name: str, timeout_factor: int = 1, device: str | None = None
) -> Callable[[CheckFunction], CheckFunction]:
    """Append the decorated function to a list of checks; its docstring is the promise."""

    def register(run: CheckFunction) -> CheckFunction:
        checks.append(
            Check(name, (run.__doc__ or "").strip().rstrip("."), run, timeout_factor, device)
        )
        return run

    return register


def tally(number: int, noun: str) -> str:
    """``"1 sample"``, ``"2 samples"``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        name: of the check.
        status: ``ok``, ``failed`` or ``skipped``.
        number: of the call that failed, among the check's.
    """

    name: str
    status: str
    note: str
    number: int | None = None


def outcome_of(name: str, run: Callable[[], str]) -> Line:
    """Run a check and return its line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Line(name, "ok", run())
    except unittest.SkipTest as reason:
        return Line(name, "skipped", str(reason))
    except Exception as error:  # torch's own checks raise errors of any type
        kind, text = (
            "" if isinstance(error, AssertionError) else f"{type(error).__name__}: ",
            " ".join(str(error).split()),
        )
        return Line(name, "failed", kind + (text if len(text) <= 400 else f"{text[:400]} …"))

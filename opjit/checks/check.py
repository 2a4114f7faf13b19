"""One check of an op, and how a list of them is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from opjit.op import Op
from opjit.samples import Sample

Run = Callable[[Op, str], str]  # looks at an op on a device; returns a note


class Check(NamedTuple):
    """One check.

    Attributes:
        name: as in the table.
        promise: what holds where it passes.
        run: called with an op and a device; returns a note for the table.
    """

    name: str
    promise: str
    run: Run

    def __call__(self, op: Op, device: str) -> None:
        """
        Raises:
            AssertionError: the op breaks the promise.
            Skipped: the check does not apply.
        """
        self.run(op, device)

    def __str__(self) -> str:
        return self.name


def add(checks: list[Check], name: str) -> Callable[[Run], Run]:
    """What makes a function the next check of a list: its docstring is the promise."""
    def added(run: Run) -> Run:
        checks.append(Check(name, (run.__doc__ or "").strip().rstrip("."), run))
        return run

    return added


def expect_sentence(op: Op, error: RuntimeError, sample: Sample) -> str:
    """The message of a refusal, which must be one line that names the op."""
    message = str(error)
    if op.schema.name not in message or "\n" in message.strip():
        raise AssertionError(f"on ({sample}) the op is expected to refuse in one line that names it, and says {message!r}") from None
    return message

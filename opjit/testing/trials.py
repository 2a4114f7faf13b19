"""The calls of a check, one by one, so that a report names the call that failed and a run can repeat it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from opjit.declare.sample import Sample


class CallWatch(NamedTuple):
    """How a check is run.

    Attributes:
        at: is called before each call with its number and sample: if the kernel ends the process, this is where.
        only: the number of the only call to make; None is all of them.
        running: is called with what runs from now on, ``"kernel"`` or ``"reference"``: the time limit is for one call of it.
    """

    at: Callable[[int, Sample], object]
    only: int | None = None
    running: Callable[[str], object] = lambda subject: None


watch: ContextVar[CallWatch] = ContextVar("watch", default=CallWatch(lambda number, sample: None))  # noqa: B039 - a NamedTuple


@contextmanager
def reference_runs() -> Iterator[None]:
    """Say that the reference runs in this block: its time is not the kernel's."""
    say = watch.get().running
    say("reference")
    try:
        yield
    finally:
        say("kernel")


def trials(calls: Iterable[Sample]) -> Iterator[Sample]:
    """Yield a check's calls in an order that is always the same. A check has one loop over them, and calls the op nowhere else.

    Raises:
        AssertionError: the only call to make is not one of them.
    """
    at, only, _ = watch.get()
    number = -1
    for number, sample in enumerate(calls):
        if only in (None, number):
            at(number, sample)
            yield sample
    if only is not None and only > number:
        raise AssertionError(f"there is no sample {only}: this check calls the op {number + 1} times, counted from 0")

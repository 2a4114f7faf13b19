"""The calls of a check, one by one, so that a report names the call that failed and a run can repeat it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

from opjit.declare.sample import Sample


class Watch(NamedTuple):
    """How a check is run.

    Attributes:
        at: is called before each call with its number and sample: if the kernel ends the process, this is where.
        only: the number of the only call to make; None is all of them.
        after: is called after each call.
    """

    at: Callable[[int, Sample], object]
    only: int | None = None
    after: Callable[[], object] = lambda: None


watch: ContextVar[Watch] = ContextVar("watch", default=Watch(lambda number, sample: None))  # noqa: B039 - a NamedTuple


def trials(calls: Iterable[Sample]) -> Iterator[Sample]:
    """Yield a check's calls in an order that is always the same. A check has one loop over them, and calls the op nowhere else.

    Raises:
        AssertionError: the only call to make is not one of them.
    """
    at, only, after = watch.get()
    number = -1
    for number, sample in enumerate(calls):
        if only in (None, number):
            at(number, sample)
            yield sample
            after()
    if only is not None and only > number:
        raise AssertionError(f"there is no sample {only}: this check calls the op {number + 1} times, counted from 0")

"""``opjit test`` and a project's own pytest: every check there is for an op, on the samples that it declares.

    from opjit import testing

    [OP] = testing.load(Path(__file__).parent)

    @pytest.mark.parametrize("check", testing.CHECKS, ids=str)
    def test_op(check):
        check(OP, "cpu")

or ``testing.check(OP, "cpu")`` for all of them at once. A check returns a note, raises AssertionError with one sentence, or raises
`Skipped`, which pytest knows as a skip, where it has nothing to say about the op.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import tempfile
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from opjit import api, catalog
from opjit.checks import CHECKS
from opjit.checks.check import Check
from opjit.checks.results import DTYPES
from opjit.op import Op
from opjit.samples import Skipped, samples

__all__ = ["CHECKS", "DTYPES", "Check", "Line", "Skipped", "check", "load", "outcome_of", "results", "run"]


def load(folder: Path) -> list[Op]:
    """The ops of a folder, which need not be on any path."""
    return catalog.add_path(folder)


def check(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> None:
    """All checks of an op on a device.

    Raises:
        AssertionError: one line for each that failed.
    """
    failed = [line for line in results(op, device, checks) if line.status == "failed"]
    if failed:
        raise AssertionError(f"{op.qualified} on {device}:\n" + "\n".join(f"{line.name}: {line.note}" for line in failed))


class Line(NamedTuple):
    """A line of the table: a check's name, ``ok``, ``failed`` or ``skipped``, and a sentence."""

    name: str
    status: str
    note: str


def results(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> Iterable[Line]:
    """Run checks one after another.

    Raises:
        CompileError, NoKernel, …: the op cannot be built for the device.
        DeclarationError: it has no reference or no samples.
    """
    api.get(op.qualified, device)
    _ = op.plain, samples(op, device)
    return (outcome_of(each.name, lambda each=each: each.run(op, device)) for each in checks)  # type: ignore[misc]


def outcome_of(name: str, run: Callable[[], str]) -> Line:
    """The line of one check."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Line(name, "ok", run())
    except unittest.SkipTest as reason:
        return Line(name, "skipped", str(reason))
    except AssertionError as error:
        return Line(name, "failed", _sentence(error))
    except Exception as error:  # torch's checks raise what they like
        return Line(name, "failed", f"{type(error).__name__}: {_sentence(error)}")


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} …"


@contextmanager
def _told_of_crashes() -> Iterator[None]:
    """Where a kernel ends the process, Python says on stderr in which check it was."""
    enabled = not faulthandler.is_enabled()
    if enabled:
        with suppress(OSError, RuntimeError):  # stderr is no file, or is not there
            faulthandler.enable()
    try:
        yield
    finally:
        if enabled:
            faulthandler.disable()


def run(names: Sequence[str], device: str | None, sanitizers: Sequence[str]) -> int:
    """Print a table for each op and device; returns the command's exit code.

    Args:
        names: of ops, or paths of their folders.
        sanitizers: such as ``"address"`` or ``"memcheck"``, for the kinds of device that they are for.
    """
    from opjit import sanitize

    checked = failed = 0
    with tempfile.TemporaryDirectory(prefix="opjit-") as scratch, _told_of_crashes():
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)  # or it would be a folder in the user's
        for op, each in catalog.named_on(names, device, partial(print, flush=True)):
            checked += 1
            print(f"{op.qualified} on {each}", flush=True)
            # The sanitizers first: what they are there to find may end this process.
            for line in itertools.chain(sanitize.lines(op, each, sanitizers), results(op, each)):
                failed += line.status == "failed"
                print(f"  {line.status:<8} {line.name:<18} {line.note}", flush=True)
    print(f"{failed} failed" if failed else "all hold" if checked else "nothing was checked")
    return 1 if failed or not checked else 0

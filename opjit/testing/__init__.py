"""``opjit test``, and the same checks in a project's own pytest: every check of an op, on the samples that it declares.

    from opjit import testing

    [OP] = testing.load(Path(__file__).parent)

    @pytest.mark.parametrize("check", testing.CHECKS, ids=str)
    def test_op(check):
        check(OP, "cpu")

or ``testing.check(OP, "cpu")`` for all of them at once. A check returns a note, or raises an AssertionError with a one-line message. A
check that does not apply to the op raises `Skipped`, which pytest reports as a skip.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from opjit import backends, request
from opjit.declare import arguments, catalog
from opjit.declare.op import Op
from opjit.testing import cuda, integration, numerics, refusals
from opjit.testing.checks import Check, Line, outcome_of
from opjit.testing.numerics import DTYPES
from opjit.testing.samples import Skipped, samples

__all__ = ["CHECKS", "DTYPES", "Check", "Line", "Skipped", "check", "load", "outcome_of", "results", "run"]

CHECKS: list[Check] = [*numerics.CHECKS, *integration.CHECKS, *refusals.CHECKS, *cuda.CHECKS]  # in the table's order


def load(folder: Path) -> list[Op]:
    """The ops of a folder, which OPJIT_PATH need not name."""
    return catalog.add_path(folder)


def check(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> None:
    """Run all checks of an op on a device.

    Raises:
        AssertionError: has one line for each failed check.
    """
    failed = [line for line in results(op, device, checks) if line.status == "failed"]
    if failed:
        raise AssertionError(f"{op.qualified} on {device}:\n" + "\n".join(f"{line.name}: {line.note}" for line in failed))


def results(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> Iterable[Line]:
    """Build the op, then run one check for each line that the caller takes.

    Raises:
        CompileError, NoKernel, …: the op cannot be built for the device.
        DeclarationError: the op has no reference or no samples.
    """
    request.ready(op, backends.for_device(device))
    _ = op.plain, samples(op, device)
    return (outcome_of(each.name, lambda each=each: each.run(op, device)) for each in checks)  # type: ignore[misc]


def run(names: Sequence[str], device: str | None, sanitizers: Sequence[str]) -> int:
    """Print a table for each op and device. Returns the command's exit code: 1 if a check failed or none ran.

    Args:
        names: names of ops, or paths of their folders.
        device: ``"cpu"`` or ``"cuda"``; None means every device here for which an op has a kernel.
        sanitizers: such as ``"address"`` or ``"memcheck"``; each applies to its own kind of device.
    """
    from opjit.testing import sanitize

    if not faulthandler.is_enabled():  # if a kernel crashes the process, stderr shows the check
        with suppress(OSError, RuntimeError):  # stderr is closed or not a file
            faulthandler.enable()
    checked = failed = 0
    with tempfile.TemporaryDirectory(prefix="opjit-") as scratch:
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)  # else hypothesis makes a folder in the current one
        for op, each in arguments.ops_on_devices(names, device, partial(print, flush=True)):
            checked += 1
            print(f"{op.qualified} on {each}", flush=True)
            # Sanitizers run first: the bugs they find may crash this process.
            for line in itertools.chain(sanitize.lines(op, each, sanitizers), results(op, each)):
                failed += line.status == "failed"
                print(f"  {line.status:<8} {line.name:<18} {line.note}", flush=True)
    print(f"{failed} failed" if failed else "all checks hold" if checked else "nothing was checked")
    return 1 if failed or not checked else 0

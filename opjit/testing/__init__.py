"""The checks of ``opjit test``, for pytest and other programs.

In the tests of a project, run each check as one test:

    from opjit import testing

    [OP] = testing.load(Path(__file__).parent)

    @pytest.mark.parametrize("check", testing.CHECKS, ids=str)
    def test_op(check):
        check(OP, "cpu")

Outside pytest, run all checks together:

    >>> [OP] = opjit.testing.load("my_ops")
    >>> opjit.testing.check(OP, "cpu")

A check returns a note, or raises an AssertionError with a one-line message. A
check that does not apply to the op raises `Skipped`, which pytest reports as a skip.
"""

from collections.abc import Iterable
from functools import partial

from opjit import backends, request
from opjit.catalog import registry
from opjit.errors import DeclarationError
from opjit.files import StrPath
from opjit.operators.op import Op
from opjit.testing import gradients, integration, memory, numerics
from opjit.testing.checks import Check, Line, outcome_of
from opjit.testing.numerics import DTYPES, OPTIONAL
from opjit.testing.samples import Skipped, declared_samples

__all__ = ["CHECKS", "DTYPES", "OPTIONAL", "Check", "Line", "Skipped", "check", "load", "results"]

# The order is the table's.
CHECKS: list[Check] = [
    *numerics.CHECKS,
    *memory.CHECKS,
    *gradients.CHECKS,
    *integration.CHECKS,
]


def load(folder: StrPath) -> list[Op]:
    """Declare and return the ops of a directory, like `opjit.add_path`.

    Raises:
        DeclarationError: an op cannot be declared, or waives an unknown check.

    Example:
        >>> opjit.testing.load("my_ops")
        [<opjit op mylib::scale(Tensor x, float a) -> Tensor>]
    """
    return [refuse_unknown_waivers(op) for op in registry.add_path(folder)]


def check(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> None:
    """Run all checks of an op on a device.

    Raises:
        AssertionError: has one line for each failed check.
        Skipped: no check applies.

    Example:
        >>> [scale] = opjit.testing.load("my_ops")
        >>> opjit.testing.check(scale, "cpu")
    """
    lines = list(results(op, device, checks))
    failed = [f"{line.name}: {line.note}" for line in lines if line.status == "failed"]
    if failed:
        raise AssertionError("\n".join([f"{op.qualified} on {device}:", *failed]))
    if all(line.status == "skipped" for line in lines):
        raise Skipped(f"nothing was tested: no check applies to {op.qualified} on {device}")


def results(op: Op, device: str, checks: Iterable[Check] = CHECKS) -> Iterable[Line]:
    """Build the op, then yield the result of one check after another.

    Raises:
        CompileError, NoKernel, …: the op cannot be built for the device.
        DeclarationError: the op lacks a reference or sample inputs, or waives an unknown check.

    Example:
        >>> [scale] = opjit.testing.load("my_ops")
        >>> [line.name for line in opjit.testing.results(scale, "cpu") if line.status == "failed"]
        []
    """
    prepare(op, device)
    return (outcome_of(each.name, partial(each.__call__, op, device)) for each in checks)


def prepare(op: Op, device: str) -> None:
    """Build the op if necessary, and evaluate the values that the checks need."""
    request.ready(refuse_unknown_waivers(op), backends.for_device(device))
    declared_samples(op, device)


def refuse_unknown_waivers(op: Op) -> Op:
    """Return the op. Raises DeclarationError if it waives an unknown check, because its author expects that one is skipped."""
    names = [check.name for check in CHECKS]
    for name in op.declaration.waived:
        if name not in names:
            raise DeclarationError(
                f"{op.qualified} waives {name!r}, which is no check; the checks are {', '.join(names)}"
            )
    return op

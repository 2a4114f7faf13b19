"""The checks of an emulated CUDA kernel: the checks of `opjit test`, and another for races, bounds and barriers."""

import time

from opjit import backends
from opjit.declare.sample import Sample
from opjit.emulate import build
from opjit.emulate.translate import synchronization
from opjit.errors import NoKernel
from opjit.operators.op import Op
from opjit.testing import refuse_unknown_waivers
from opjit.testing.checks import Check, add
from opjit.testing.samples import (
    SMALL,
    Skipped,
    declared_samples,
    distinct_samples,
    effects,
    trials,
)

_LARGEST = 100_000  # elements of a sample, so that a call lasts milliseconds
_CALLS = 32  # with checks: samples of different kinds first, then of other sizes
_SCHEDULES = 3  # of each
_LONG = 2.0  # seconds after which the next sample is tried
CHECKS = list[Check]()


@add(CHECKS, "races", timeout_factor=12)
def _races(op: Op, device: str) -> str:
    """No race, no address out of bounds, no read of what nobody wrote and no barrier that threads miss, in each schedule that was tried."""
    runtime = build.runtime()
    schedules = 0
    for sample in trials(_calls(op, device)):
        start = time.monotonic()
        for seed in range(_SCHEDULES):
            runtime.emu_set_seed(seed + 1)
            effects(op.overload, op, sample)
            schedules += 1
            if time.monotonic() - start > _LONG:
                break
    return f"{schedules} schedules{_not_reached(op)}"


def _not_reached(op: Op) -> str:
    """Describe the barriers and atomics of the kernel's file that no sample has reached, because no check saw them."""
    source = op.declaration.source(backends.for_device("cuda"))
    lines = synchronization(source.read_text("utf-8", "surrogateescape"))
    places = [f"{source.name}:{line}" for line in lines]
    reached = build.runtime().emu_reached().decode().split()
    missed = [place for place in places if place not in reached]
    shown = ", ".join(missed)
    if not missed:
        return ""
    return f", {len(missed)} of {len(places)} barriers and atomics not reached ({shown})"


def _calls(op: Op, device: str) -> list[Sample]:
    """Choose small samples: first of different kinds, then of other sizes, because sizes also decide which accesses race."""
    others = [sample for sample in op.samples_on(device) if 0 < sample.numel <= SMALL]
    samples = {str(each): each for each in [*distinct_samples(op, device, _CALLS), *others]}
    return [*samples.values()][:_CALLS]


def compile_both(op: Op) -> str:
    """Build an op's kernel with and without checks. Raises Skipped for a feature that is not emulated, or the errors of `build.load`."""
    try:
        for checked in (True, False):
            build.binary(op, checked)
    except NoKernel as reason:
        raise Skipped(str(reason)) from None
    return "emulated: compiled"


def prepare(op: Op, checked: bool) -> None:
    """Make torch call an op's emulated kernel for CPU tensors, in a child process of `opjit test`."""
    build.install_emulated(refuse_unknown_waivers(op), checked)
    samples = [each for each in declared_samples(op, "cpu") if each.numel <= _LARGEST]
    op.samples(lambda device: iter(samples))
    op.waive("rejects", "a CUDA kernel cannot raise an error for an index")

"""Checks and measurements of a notebook's op.

The checks run in a fresh process: they fork children, which fails after CUDA, OpenMP or autograd has started threads, and a kernel that
crashes does not take the notebook with it. Measurements run where the notebook's tensors are.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import click
import torch
from rich.box import SIMPLE
from rich.table import Table

from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.errors import BadSetting, ToolMissing
from opjit.live import reload
from opjit.measure.plan import Inputs, Measurement
from opjit.measure.timing import measure, plan_of
from opjit.measure.units import format_time

Sides = Mapping[str, Callable[..., Any]]  # the op, and perhaps a reference, by their names in the table


class TimedCall(NamedTuple):
    """A call to measure.

    Attributes:
        label: its line in the table.
        place: the number that it has on the plot's axis.
    """

    label: str
    place: float
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Row = tuple[TimedCall, Mapping[str, Measurement]]  # a call, measured on each side


def check(make: Callable[[], Op], reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of `opjit test` for an op, as they come, on the device of its first tensor.

    Args:
        make: makes the op, which needs no declaration.
        args, kwargs: the arguments of the only sample.

    Raises:
        ToolMissing: cloudpickle, which carries the notebook's functions to the process, is not installed.
        BadSetting: it cannot carry them.
    """
    if find_spec("cloudpickle") is None:
        raise ToolMissing("cloudpickle", "--test needs cloudpickle, which is not installed: pip install cloudpickle")
    import cloudpickle  # type: ignore[import-untyped]

    sample = Sample(args, kwargs)
    device = next((each.device.type for each in sample.tensors()), "cpu")
    try:
        work = cloudpickle.dumps(partial(_check, make, reference, sample.map(torch.Tensor.cpu), device))
    except Exception as error:  # the objects' own
        raise BadSetting(f"--test runs the checks in another process, to which the reference, the fake kernel and the arguments cannot be "
                         f"carried: {error}; give functions and values that pickle takes") from error
    code = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(work)
            process.stdin.close()
            yield from (line.decode(errors="replace") for line in process.stdout)
        except BaseException:  # also an interrupt
            process.kill()
            raise


def _check(make: Callable[[], Op], reference: Callable[..., Any], sample: Sample, device: str) -> None:
    """Declare the op in the process, and print its table."""
    from opjit.testing import command

    op = make()
    reload.install([op])
    op.reference(reference)
    op.samples(lambda where: iter([sample.map(lambda tensor: tensor.to(where))]))
    with click.Context(click.Command("test")) as context:
        context.color = True  # the notebook shows colours
        command.report(op, device)


def compare(sides: Sides, call: TimedCall) -> Row:
    """Time a call on each side, in turns.

    Raises:
        AssertionError: the sides' results differ.
    """
    first, *others = [side(*call.args, **call.kwargs) for side in sides.values()]
    for other in others:
        torch.testing.assert_close(first, other, equal_nan=True)
    tensors = tensors_of((call.args, call.kwargs, first))
    device, moved = next((each.device.type for each in tensors), "cpu"), sum(each.nbytes for each in tensors)
    return call, measure(plan_of(sides, Inputs(call.args, call.kwargs), device, moved=moved))


def _rate(side: Measurement) -> float:
    """Return the GB/s at which arguments and results move."""
    return side.bytes / side.median / 1e9


def table(title: str, names: Sequence[str], rows: Sequence[Row]) -> Table:
    """Make a line for each call: time and bandwidth of each side, and the ratio of the op's time to the reference's."""
    lines = Table(title, box=SIMPLE, header_style="", show_edge=False)
    for name in names:
        lines.add_column(name, justify="right")
        lines.add_column("GB/s", justify="right")
    if len(names) > 1:
        lines.add_column("ratio", justify="right")
    for call, sides in rows:
        cells = [text for side in sides.values() for text in (format_time(side.median), f"{_rate(side):.1f}")]
        op, *others = (side.median for side in sides.values())
        lines.add_row(call.label, *cells, *(f"{op / other:.2f}" for other in others))
    return lines


def plot(title: str, names: Sequence[str], rows: Sequence[Row]) -> bytes:
    """Draw a PNG of the bandwidth that each side reaches: over the places of several calls, or a bar for each side of one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        rates = [_rate(sides[name]) for _, sides in rows]
        if len(rows) == 1:
            axes.bar([name], rates)
        else:
            axes.plot([call.place for call, _ in rows], rates, marker=".", label=name)
    if len(rows) > 1:
        axes.set_xscale("log", base=2)
        axes.legend()
    axes.set(ylabel="GB/s", xlabel=title, ylim=(0, None))
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()

"""Checks and measurements of a notebook's op. Measurements run where the notebook's tensors are, and checks in a fresh process: they fork
children, which fails after CUDA, OpenMP or autograd has started threads, and a kernel that crashes does not end the notebook."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click
import cloudpickle  # type: ignore[import-untyped]
import torch
from rich.box import SIMPLE
from rich.table import Table

from opjit.declare.sample import Sample, tensors_of
from opjit.errors import BadSetting
from opjit.live import reload
from opjit.measure.plan import Inputs, Measurement
from opjit.measure.timing import measure, plan_of
from opjit.measure.units import format_time
from opjit.operators.op import Op

# The op, and perhaps a reference, by their names in the table.
Sides = Mapping[str, Callable[..., Any]]


def check_sample(
    make: Callable[[], Op],
    reference: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[str]:
    """Yield the lines of `opjit test` as they come, for one sample. Raises BadSetting if cloudpickle cannot carry it."""
    sample = Sample(args, kwargs)
    device = next((each.device.type for each in sample.tensors()), "cpu")
    try:
        work = cloudpickle.dumps(
            partial(_print_table, make, reference, sample.map(torch.Tensor.cpu), device)
        )
    except Exception as error:  # of the objects
        raise BadSetting(
            f"--test runs the checks in another process, to which the reference, the fake kernel and the arguments cannot be "
            f"carried: {error}; use functions and values that pickle supports"
        ) from error
    code = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(work)
            process.stdin.close()
            yield from (line.decode(errors="replace") for line in process.stdout)
        except BaseException:  # also an interrupt
            process.kill()
            raise


def _print_table(
    make: Callable[[], Op], reference: Callable[..., Any], sample: Sample, device: str
) -> None:
    """Declare the op in the process, and print its table."""
    from opjit.testing import command

    op = make()
    reload.install([op])
    op.reference(reference)
    op.samples(lambda where: iter([sample.map(lambda tensor: tensor.to(where))]))
    with click.Context(click.Command("test")) as context:
        context.color = True  # the notebook shows colors
        command.show(op, device)


def compare(sides: Sides, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Measurement]:
    """Time a call on each side, in turns. Raises AssertionError where the sides' results differ."""
    first, *others = [side(*args, **kwargs) for side in sides.values()]
    for other in others:
        torch.testing.assert_close(first, other, equal_nan=True)
    tensors = tensors_of((args, kwargs, first))
    device = next((each.device.type for each in tensors), "cpu")
    moved = sum(each.nbytes for each in tensors)
    return list(measure(plan_of(sides, Inputs(args, kwargs), device, moved=moved)).values())


def table(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Measurement]]) -> Table:
    """Make a line for each call: time and bandwidth of each side, and the ratio of the op's time to the reference's."""
    lines = Table(title, box=SIMPLE, header_style="", show_edge=False)
    for name in names:
        lines.add_column(name, justify="right")
        lines.add_column("GB/s", justify="right")
    for _ in names[1:]:
        lines.add_column("ratio", justify="right")
    for label, sides in rows.items():
        cells = [
            text
            for side in sides
            for text in (format_time(side.median), f"{side.bytes / side.median / 1e9:.1f}")
        ]
        lines.add_row(
            label, *cells, *(f"{sides[0].median / other.median:.2f}" for other in sides[1:])
        )
    return lines

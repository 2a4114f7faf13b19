"""``opjit bench``: times ops against their references in plain torch, in the same run, after validating their results."""

import importlib
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_map

from opjit import api, processes
from opjit.catalog import arguments
from opjit.declare.declaration import Function
from opjit.declare.sample import Sample, Workload
from opjit.errors import BadSetting
from opjit.judge.referee import max_difference
from opjit.measure import machine
from opjit.measure.plan import Measurement, ratio
from opjit.measure.timing import measure, plan_of
from opjit.measure.units import busy_note, format_rate, format_time
from opjit.operators.op import Op
from opjit.tensors import tensors_of
from opjit.testing.samples import effects, expected_of

_NOISY = 0.1  # a spread above which a ratio is not to be trusted


@dataclass(frozen=True)
class Comparison:
    """One workload, measured in turns on the op and on `against`; errors are relative to the reference's result for float64 inputs."""

    op: str
    device: str
    label: str
    against: str
    ours: Measurement
    theirs: Measurement
    ratio: float
    spread: float
    error: float
    reference_error: float

    def document(self) -> dict[str, Any]:
        """Return the numbers, for JSON: seconds, bytes, operations and MHz."""
        numbers = dict(vars(self))
        ours = numbers.pop("ours")
        theirs = numbers.pop("theirs")
        numbers |= {name: getattr(ours, name) for name in _OF_OURS.split()}
        return {
            **numbers,
            "opjit": ours.median,
            "reference": theirs.median,
            "quartiles": [ours.lower, ours.upper],
            "reference_quartiles": [theirs.lower, theirs.upper],
            "reference_host": theirs.host,
        }


_OF_OURS = "bytes flops bound possible cold calls inputs clock way host"
# The baseline of an op: its name in the table, and a way to get it.
_Side = tuple[str, Callable[[Op], Function]]
_TORCH: _Side = ("torch", lambda op: op.reference_function)


def _side(against: str | None) -> _Side:
    """Find the side that ``--against`` names: torch.compile, an op, or a function of a module. Raises BadSetting if it does not exist."""
    if against is None:
        return _TORCH
    if against == "torch.compile":
        return "compile", _compiled
    module, _, name = against.rpartition(":")
    try:
        of_torch = module.endswith(":")
        place = getattr(torch.ops, module[:-1]) if of_torch else importlib.import_module(module)
        other = getattr(place, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadSetting(
            "--against: expected torch.compile, an op (namespace::name) or a function (module:name), got "
            f"{against!r} ({error})"
        ) from error
    return name, lambda op: other


def _compiled(op: Op) -> Function:
    torch._dynamo.reset()  # a workload must not count towards another's limit of recompilations
    compiled: Function = torch.compile(op.reference_function, dynamic=False)
    return compiled


def benchmark(
    ops: Sequence[str],
    device: str | None,
    only: str | None,
    print_json: Callable[[object], None] | None,
    against: str | None = None,
    cold: bool | None = None,
) -> int:
    """Measure the benchmark cases with `only` in their label, and print a table and a summary for each op and device. `cold` None: cold on
    CUDA. Returns the exit code: 1 if nothing was measured. Raises AssertionError where a result is wrong, on either side."""
    side = _side(against)
    console = Console(highlight=False, soft_wrap=True)
    measurements = []
    for op, each in arguments.ops_on_devices(ops, device, console.print):
        called = api.get(op.qualified, each)
        on_cuda = each == "cuda"
        caches = "cold" if cold or (cold is None and on_cuda) else "hot"
        console.print(
            f"[bold]{op.qualified} on {each}[/]\n{caches} cache, {machine.describe_machine(each)}"
        )
        titles = ("opjit", "host us" * on_cuda, side[0], "speed", "+-", "rate", "roof" * on_cuda)
        console.print(_row("workload", *titles, "error", "torch's"))
        rows = []
        for workload in op.workloads_on(each):
            if only is None or only in workload.label:
                # Python's handler would wait for a kernel that never returns.
                with processes.handling([signal.SIGINT], signal.SIG_DFL):
                    rows.append(compare_on(op, called, each, workload, side, cold))
                console.print(_format(rows[-1]))
        if rows:
            console.print("\n".join((summary(rows), *_doubts(rows), "")))
        measurements += rows
    if not measurements and only is not None:
        raise BadSetting(f"nothing was measured: no workload's label contains {only!r}")
    if not measurements:
        console.print("nothing was measured")
        return 1
    if print_json is not None:
        print_json([m.document() for m in measurements])
    return 0


def _doubts(measurements: Sequence[Comparison]) -> Iterator[str]:
    """Yield the clocks that were seen, and a line for each reason not to trust a number."""
    busy = busy_note()
    if busy:
        yield busy
    clocks = [clock for m in measurements for clock in m.ours.clock or ()]
    if clocks:
        yield f"SM clock: {min(clocks)} to {max(clocks)} MHz"
    noisy = sum(m.spread > _NOISY for m in measurements)
    if noisy:
        yield (
            f"noisy: the rounds of {noisy} of {len(measurements)} workloads spread by more than {_NOISY:.0%};\n"
            "free the machine, and measure again"
        )
    for m in measurements:
        for name, each in (("opjit", m.ours), (m.against, m.theirs)):
            least = f"the device needs at least {format_time(each.floor)}"
            if not each.possible:
                yield f"impossible: {name} on {m.label}: {least if each.agrees else 'work outside the timed stream'}"
            if each.way == "issue":
                yield f"{name} on {m.label} cannot be captured in a CUDA graph, so its time includes CPU time"


def summary(rows: Sequence[Comparison]) -> str:
    """Say in how many workloads an op is faster or slower by more than 5 %, and the extreme speeds."""
    faster = sum(m.ratio < 0.95 for m in rows)
    slower = sum(m.ratio > 1.05 for m in rows)
    best = min(rows, key=lambda m: m.ratio)
    worst = max(rows, key=lambda m: m.ratio)
    return (
        f"faster in {faster} of {len(rows)}, equal in {len(rows) - faster - slower}, slower in {slower}\n"
        f"speed: median {_speed(statistics.median(m.ratio for m in rows))}, best {_speed(best.ratio)} ({best.label}), "
        f"worst {_speed(worst.ratio)} ({worst.label})"
    )


def _speed(ratio: float) -> str:
    """Format a ratio of times as a speed: "1.05x" is faster than the other side, in at most five characters below 1000x."""
    speed = 1 / ratio
    return f"{speed:.{2 if speed < 10 else 1 if speed < 100 else 0}f}x"


def _row(label: str, *cells: str) -> str:
    """Format a line of the table, 80 columns wide, without a column for an empty cell."""
    widths = (8, 8, 8, 6, 5, 14, 5, 6, 8)
    return f"{label:<13}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True) if cell
    )


def _format(m: Comparison) -> str:
    work, unit = (m.ours.flops, "FLOP") if m.ours.flops else (m.ours.bytes, "B")
    rate = format_rate(work / m.ours.median, unit) if work else "-"
    host = f"{1e6 * m.ours.host:.1f}" if m.ours.host is not None else ""
    roof = f"{m.ours.of_bound:.2f}" if m.ours.of_bound else "-" * (m.device == "cuda")
    return _row(
        m.label,
        format_time(m.ours.median),
        host,
        format_time(m.theirs.median),
        _speed(m.ratio),
        f"{min(m.spread, 9.99):.0%}",
        rate,
        roof,
        f"{m.error:.0e}",
        f"{m.reference_error:.0e}",
    )


def compare_on(
    op: Op,
    called: Function,
    device: str,
    workload: Workload,
    side: _Side = _TORCH,
    cold: bool | None = None,
) -> Comparison:
    """Measure one workload. Raises AssertionError where a result is wrong, on either side."""
    name, function_for = side
    other = function_for(op)
    with torch.inference_mode():
        errors = _errors(op, called, workload)
        if other is not op.reference_function:
            _errors(op, other, workload, name)
        sides = {"opjit": called, name: other}
        plan = plan_of(
            sides, (workload.args, workload.kwargs), device, cold, workload.bytes, workload.flops
        )
        ours, theirs = measure(plan).values()
    names = (op.qualified, device, workload.label, name)
    return Comparison(*names, ours, theirs, *ratio(ours, theirs), *errors)


def _errors(
    op: Op, called: Function, workload: Workload, name: str | None = None
) -> tuple[float, float]:
    """Return the errors of `called` and of the reference, relative to the exact result. Raises AssertionError if a result is wrong."""
    sample = Sample(workload.args, workload.kwargs)
    result = effects(called, op, sample)
    expected = expected_of(op, sample)
    # The error of a sum over many elements grows like a random walk.
    longest = max(t.numel() for t in sample.tensors()) / max(
        [1, *(t.numel() for t in tensors_of(expected))]
    )
    torch.testing.assert_close(
        result,
        expected,
        rtol=1e-2,
        atol=1e-2 * max(1.0, longest**0.5),
        equal_nan=True,
        msg=lambda text: f"{name or op.qualified} is wrong on {workload.label}: {text}",
    )
    exact = tensors_of(expected_of(op, Sample(*tree_map(_double, sample.values))))
    return _distance(tensors_of(result), exact), _distance(tensors_of(expected), exact)


def _double(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    is_floating = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return value.double() if is_floating else value


def _distance(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return the largest absolute error of any result, relative to its largest exact value."""
    worst = 0.0
    for got, expected in zip(results, exact, strict=True):
        if got.numel():
            scale = max_difference(expected, torch.zeros_like(expected)).clamp_min(1e-300)
            worst = max(worst, float(max_difference(got, expected) / scale))
    return worst

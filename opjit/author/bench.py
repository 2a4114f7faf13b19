"""``opjit bench``: times ops against their references in plain torch, in the same run, after validating their results."""

from __future__ import annotations

import importlib
import json
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.utils._pytree import tree_map

from opjit import api
from opjit.builder import torch_builder
from opjit.declare import arguments
from opjit.declare.op import Op, Workload
from opjit.declare.sample import Sample, tensors_of
from opjit.errors import BadSetting, ToolMissing
from opjit.testing.samples import effects

_ROUNDS = 9
_ROUND_SECONDS = 0.02
_COPIED = 1 << 26
_NOISY = 0.1  # a spread above which a ratio is not to be trusted


@dataclass(frozen=True)
class Measurement:
    """The measurement of one workload.

    Attributes:
        against: the other side: ``"torch"`` for the op's reference, or what ``--against`` names.
        opjit, reference: seconds per call of both sides, the medians of interleaved rounds.
        spread: half of the distance between the quartiles of the rounds' ratios, relative to their median.
        bytes, flops: the fewest bytes that the op must move and operations that it must do; 0 if they do not bound its time.
        of_copy: the bandwidth, as a fraction of a plain copy's on the same device; None on the CPU.
        error, reference_error: the largest difference from the reference's result for float64 inputs, relative to that result.
    """

    op: str
    device: str
    label: str
    against: str
    opjit: float
    reference: float
    spread: float
    bytes: int
    flops: int
    of_copy: float | None
    error: float
    reference_error: float

    @property
    def ratio(self) -> float:
        return self.opjit / self.reference


class _Side(NamedTuple):
    """What the op is measured against: a name for the table, and a function that makes it callable."""

    name: str
    of: Callable[[Op], Callable[..., Any]]


def _side(against: str | None) -> _Side:
    """The side that ``--against`` names: torch.compile, an op, or a function of a module.

    Raises:
        BadSetting: there is none of that name.
    """
    if against is None:
        return _Side("torch", lambda op: op.plain)
    if against == "torch.compile":
        return _Side("compile", _compiled)
    module, _, name = against.rpartition(":")
    try:
        if module.endswith(":"):
            other = getattr(getattr(torch.ops, module.removesuffix(":")), name)
        else:
            other = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadSetting(f"--against {against} names nothing ({error}); give torch.compile, an op as namespace::name, or a "
                         "function as module:name") from error
    return _Side(name, lambda op: other)


def _compiled(op: Op) -> Callable[..., Any]:
    torch._dynamo.reset()  # a workload must not count towards another's limit of recompilations
    compiled: Callable[..., Any] = torch.compile(op.plain, dynamic=False)
    return compiled


def benchmark(names: Sequence[str], device: str | None, only: str | None, json_file: Path | None,
              plot_file: Path | None = None, against: str | None = None) -> int:
    """Measure the workloads of ops and print tables. Returns the command's exit code: 1 if nothing was measured.

    Calls run in inference mode. On CUDA, calls are issued back to back and synchronised at the end of a round, so the time of a small
    workload is the host's time to issue it.

    Args:
        names: names of ops, or paths of their folders.
        device: ``"cpu"`` or ``"cuda"``; None means every device here for which an op has a kernel.
        only: measure only workloads whose label contains this text.
        json_file, plot_file: files for the numbers and for a picture, or None.
        against: measure against ``"torch.compile"`` of the reference, an op (``"aten::neg"``) or a function (``"module:name"``) with the
            op's arguments, such as a Triton kernel's; None means the reference.

    Raises:
        AssertionError: an op's result, or the other side's, is wrong.
        ToolMissing: a picture needs matplotlib.
        BadSetting: `against` names nothing; or a file cannot be written, and the tables are printed before that.
    """
    side = _side(against)
    if plot_file is not None:
        require_matplotlib()
    console = Console(highlight=False, soft_wrap=True)
    measurements = []
    copies: dict[str, float] = {}
    for op, each in arguments.ops_on_devices(names, device, console.print):
        called = api.get(op.qualified, each)
        console.print(f"[bold]{op.qualified} on {each}[/] ({_describe(each)})")
        if each == "cuda":
            copies[each] = copies.get(each) or _copy_bandwidth(each)
            console.print(f"a copy of float32 2^{_COPIED.bit_length() - 1}: {copies[each] / 1e9:.0f} GB/s")
        console.print(_row("workload", "opjit", side.name, "ratio", "+-", "rate", "copy" if each in copies else "", "error", "torch's"))
        for workload in op.work(each):
            if only is None or only in workload.label:
                with _ended_by_ctrl_c():
                    measurements.append(_measure(op, called, each, workload, copies.get(each), side))
                console.print(_format(measurements[-1]))
    if not measurements:
        console.print("nothing was measured" + ("" if only is None else f": no workload's label contains {only!r}"))
        return 1
    console.print("\n" + "\n".join(summaries(measurements)), soft_wrap=True)
    noisy = sum(m.spread > _NOISY for m in measurements)
    if noisy:
        console.print(f"noisy: the rounds of {noisy} of {len(measurements)} workloads spread by more than {_NOISY:.0%};\n"
                      "free the machine, and measure again")
    try:
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(m) for m in measurements], indent=1, default=str))
        if plot_file is not None:
            draw(measurements, plot_file)
    except OSError as error:
        raise BadSetting(f"the measurements cannot be written: {error}; choose another file") from error
    return 0


def summaries(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Two lines for each op and device: in how many workloads it is faster or slower by more than 5 %, and the extreme ratios."""
    for title, group in _groups(measurements).items():
        faster, slower = sum(m.ratio < 0.95 for m in group), sum(m.ratio > 1.05 for m in group)
        best, worst = min(group, key=lambda m: m.ratio), max(group, key=lambda m: m.ratio)
        yield f"{title}: faster in {faster} of {len(group)}, equal in {len(group) - faster - slower}, slower in {slower}"
        yield (f"  ratio: median {statistics.median(m.ratio for m in group):.2f}, best {best.ratio:.2f} ({best.label}), "
               f"worst {worst.ratio:.2f} ({worst.label})")


def _groups(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(f"{m.op} on {m.device}", []).append(m)
    return groups


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """While kernels run, Ctrl-C ends the process: Python's handler would wait for a kernel that never returns."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _describe(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} threads, torch {torch.__version__}"


def _row(label: str, *cells: str) -> str:
    """A line of the table, 80 columns wide; an empty cell has no column."""
    widths = (9, 9, 6, 6, 14, 6, 6, 8)
    return f"{label:<16}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True) if cell)


def _format(m: Measurement) -> str:
    rate = _flops(m.flops / m.opjit) if m.flops else f"{m.bytes / m.opjit / 1e9:.1f} GB/s" if m.bytes else "-"
    of_copy = "" if m.of_copy is None else f"{m.of_copy:.2f}"
    return _row(m.label, format_time(m.opjit), format_time(m.reference), f"{m.ratio:.2f}", f"{min(m.spread, 9.99):.0%}", rate, of_copy,
                f"{m.error:.0e}", f"{m.reference_error:.0e}")


def format_time(seconds: float) -> str:
    """Seconds with three digits and a unit."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))
    value = seconds / size
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def _measure(op: Op, called: Callable[..., Any], device: str, workload: Workload, copy: float | None, side: _Side) -> Measurement:
    other = side.of(op)
    with torch.inference_mode():
        error, reference_error = _errors(op, called, workload)
        if other is not op.plain:
            _errors(op, other, workload, side.name)
        mine, theirs = rounds_of([called, other], workload.args, workload.kwargs)
    ratios = [one / another for one, another in zip(mine, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = statistics.median(mine)
    of_copy = workload.bytes / seconds / copy if copy and workload.bytes else None
    return Measurement(op.qualified, device, workload.label, side.name, seconds, statistics.median(theirs), (high - low) / 2 / middle,
                       workload.bytes, workload.flops, of_copy, error, reference_error)


def _errors(op: Op, called: Callable[..., Any], workload: Workload, name: str | None = None) -> tuple[float, float]:
    """The errors of the op, or of another function, and of its reference, relative to the exact result.

    Raises:
        AssertionError: the result is wrong.
    """
    sample = Sample(workload.args, workload.kwargs)
    result, expected = effects(called, op, sample), effects(op.plain, op, sample)
    # The error of a sum over many elements grows like a random walk.
    longest = max(t.numel() for t in sample.tensors()) / max([1, *(t.numel() for t in tensors_of(expected))])
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2 * max(1.0, longest ** 0.5), equal_nan=True,
                               msg=lambda text: f"{name or op.qualified} is wrong on {workload.label}: {text}")
    exact = tensors_of(effects(op.plain, op, Sample(*tree_map(_double, sample.values))))
    return _distance(tensors_of(result), exact), _distance(tensors_of(expected), exact)


def _double(value: Any) -> Any:
    """Convert floating-point tensors and dtypes to float64."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value.double() if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value


def _distance(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest absolute error of any result, relative to its largest exact value."""
    worst = 0.0
    for got, wanted in zip(results, exact, strict=True):
        if got.numel():
            wide = torch.complex128 if wanted.is_complex() else torch.float64
            scale = wanted.to(wide).abs().max().clamp_min(1e-300)
            worst = max(worst, float(((got.to(wide) - wanted.to(wide)).abs().max() / scale).item()))
    return worst


def medians(functions: list[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Seconds per call of each function, the medians of the rounds; the functions take turns."""
    return [statistics.median(column) for column in rounds_of(functions, args, kwargs)]


def rounds_of(functions: list[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[float]]:
    """Seconds per call of each function in each round; the functions take turns."""
    torch_builder.import_quietly()  # the timer would import it, with a warning
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()  # a Timer's default is one
    timers = [Timer("f(*args, **kwargs)", globals={"f": f, "args": args, "kwargs": kwargs}, num_threads=threads) for f in functions]
    counts = [max(1, min(20_000, int(_ROUND_SECONDS / timer.timeit(3).median))) for timer in timers]
    rounds = [[timer.timeit(count).median for timer, count in zip(timers, counts, strict=True)] for _ in range(_ROUNDS)]
    return [list(column) for column in zip(*rounds, strict=True)]


def _copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by torch's copy of a large tensor."""
    source = torch.empty(_COPIED, device=device)
    target = torch.empty_like(source)
    [seconds] = medians([target.copy_], (source,), {})
    return 2 * source.nbytes / seconds


def require_matplotlib() -> None:
    """Raises ToolMissing where no picture can be drawn."""
    if find_spec("matplotlib") is None:
        raise ToolMissing("matplotlib", "--plot needs matplotlib, which is not installed: pip install matplotlib")


def draw(measurements: Sequence[Measurement], file: Path) -> None:
    """Draw a column for each op and device: above, the ratio to the reference; below, the bandwidth."""
    from matplotlib.figure import Figure

    groups = _groups(measurements)
    figure = Figure(figsize=(max(6.0, 0.22 * len(measurements) + 2 * len(groups)), 6), layout="constrained")
    for column, (title, group) in enumerate(groups.items()):
        labels = [m.label for m in group]
        places = range(len(group))
        above, below = (figure.add_subplot(2, len(groups), 1 + column + row * len(groups)) for row in range(2))
        above.set_title(title)
        above.bar(places, [m.ratio for m in group])
        above.axhline(1.0, color="black", linewidth=0.8)
        above.set_ylabel(f"time / {group[0].against}'s time")
        above.set_xticks(places, [""] * len(group))
        for name, label in (("opjit", "opjit"), ("reference", group[0].against)):
            rates = [m.bytes / getattr(m, name) / 1e9 if m.bytes else float("nan") for m in group]
            below.plot(places, rates, marker=".", label=label)
        below.set_ylabel("GB/s")
        below.set_xticks(places, labels, rotation=90)
        below.legend()
    figure.savefig(file, format="png", dpi=120)

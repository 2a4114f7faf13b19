"""``opjit bench``: times ops against their references in plain torch, in the same run, after validating their results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_map

from opjit import api
from opjit.builder import torch_builder
from opjit.declare import arguments
from opjit.declare.op import Op, Workload
from opjit.errors import BadSetting, ToolMissing
from opjit.testing.samples import Sample, effects, tensors_of

_ROUNDS = 9
_ROUND_SECONDS = 0.02
_COPIED = 1 << 26
_HEADER = f"{'workload':<26}{'opjit':>12}{'torch':>12}{'ratio':>8}{'GB/s':>9}{'of copy':>9}{'error':>11}{'torch error':>13}"


@dataclass(frozen=True)
class Measurement:
    """The measurement of one workload.

    Attributes:
        opjit, reference: seconds per call, the medians of interleaved rounds.
        bytes: the fewest bytes that the op must move; 0 if memory does not bound its time.
        of_copy: the bandwidth, as a fraction of a plain copy's on the same device; None on the CPU.
        error, reference_error: the largest difference from the reference's result for float64 inputs, relative to that result.
    """

    op: str
    device: str
    label: str
    opjit: float
    reference: float
    bytes: int
    of_copy: float | None
    error: float
    reference_error: float

    @property
    def ratio(self) -> float:
        return self.opjit / self.reference


def benchmark(names: Sequence[str], device: str | None, only: str | None, json_file: Path | None,
        plot_file: Path | None = None) -> int:
    """Measure the workloads of ops and print tables. Returns the command's exit code: 1 if nothing was measured.

    Calls run in inference mode. On CUDA, calls are issued back to back and synchronised at the end of a round, so the time of a small
    workload is the host's time to issue it.

    Args:
        names: names of ops, or paths of their folders.
        device: ``"cpu"`` or ``"cuda"``; None means every device here for which an op has a kernel.
        only: measure only workloads whose label contains this text.
        json_file, plot_file: files for the numbers and for a picture, or None.

    Raises:
        AssertionError: an op's result is wrong.
        ToolMissing: a picture needs matplotlib.
        BadSetting: a file cannot be written; the tables are printed before that.
    """
    if plot_file is not None and find_spec("matplotlib") is None:
        raise ToolMissing("matplotlib", "--plot needs matplotlib, which is not installed: pip install 'opjit[plot]'")
    console = Console(width=110, highlight=False)
    measurements = []
    copies: dict[str, float] = {}
    for op, each in arguments.ops_on_devices(names, device, console.print):
        called = api.get(op.qualified, each)
        console.print(f"[bold]{op.qualified} on {each}[/] ({_describe(each)})")
        if each == "cuda":
            copies[each] = copies.get(each) or _copy_bandwidth(each)
            console.print(f"a copy of float32 2^{_COPIED.bit_length() - 1}: {copies[each] / 1e9:.0f} GB/s")
        console.print(_HEADER)
        for workload in op.work(each):
            if only is None or only in workload.label:
                measurements.append(_measure(op, called, each, workload, copies.get(each)))
                console.print(_format(measurements[-1]))
    if not measurements:
        console.print("nothing was measured" + ("" if only is None else f": no workload's label contains {only!r}"))
        return 1
    try:
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(m) for m in measurements], indent=1, default=str))
        if plot_file is not None:
            draw(measurements, plot_file)
    except OSError as error:
        raise BadSetting(f"the measurements cannot be written: {error}; choose another file") from error
    return 0


def _describe(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} threads, torch {torch.__version__}"


def _format(m: Measurement) -> str:
    bandwidth = f"{m.bytes / m.opjit / 1e9:.1f}" if m.bytes else ""
    of_copy = "" if m.of_copy is None else f"{m.of_copy:.3f}"
    return (f"{m.label:<26}{1e6 * m.opjit:>9.2f} us{1e6 * m.reference:>9.2f} us{m.ratio:>8.2f}{bandwidth:>9}{of_copy:>9}"
            f"{m.error:>11.1e}{m.reference_error:>13.1e}")


def _measure(op: Op, called: Callable[..., Any], device: str, workload: Workload, copy: float | None) -> Measurement:
    with torch.inference_mode():
        error, reference_error = _errors(op, called, workload)
        mine, theirs = _medians([called, op.plain], workload.args, workload.kwargs)
    of_copy = workload.bytes / mine / copy if copy and workload.bytes else None
    return Measurement(op.qualified, device, workload.label, mine, theirs, workload.bytes, of_copy, error, reference_error)


def _errors(op: Op, called: Callable[..., Any], workload: Workload) -> tuple[float, float]:
    """The errors of the op and its reference, relative to the exact result.

    Raises:
        AssertionError: the op's result is wrong.
    """
    sample = Sample(workload.args, workload.kwargs)
    result, expected = effects(called, op, sample), effects(op.plain, op, sample)
    # The error of a sum over many elements grows like a random walk.
    longest = max(t.numel() for t in sample.tensors()) / max([1, *(t.numel() for t in tensors_of(expected))])
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2 * max(1.0, longest ** 0.5), equal_nan=True,
                               msg=lambda text: f"{op.qualified} is wrong on {workload.label}: {text}")
    exact = tensors_of(effects(op.plain, op, Sample(*tree_map(_double, tuple(sample)))))
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


def _medians(functions: list[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Seconds per call of each function; the functions take turns."""
    torch_builder.import_quietly()  # the timer would import it, with a warning
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()  # a Timer's default is one
    timers = [Timer("f(*args, **kwargs)", globals={"f": f, "args": args, "kwargs": kwargs}, num_threads=threads) for f in functions]
    counts = [max(1, min(20_000, int(_ROUND_SECONDS / timer.timeit(3).median))) for timer in timers]
    rounds = [[timer.timeit(count).median for timer, count in zip(timers, counts, strict=True)] for _ in range(_ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by torch's copy of a large tensor."""
    source = torch.empty(_COPIED, device=device)
    target = torch.empty_like(source)
    [seconds] = _medians([target.copy_], (source,), {})
    return 2 * source.nbytes / seconds


def draw(measurements: Sequence[Measurement], file: Path) -> None:
    """Draw a column for each op and device: above, the ratio to the reference; below, the bandwidth."""
    from matplotlib.figure import Figure

    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(f"{m.op} on {m.device}", []).append(m)
    figure = Figure(figsize=(max(6.0, 0.22 * len(measurements) + 2 * len(groups)), 6), layout="constrained")
    for column, (title, group) in enumerate(groups.items()):
        labels = [m.label for m in group]
        places = range(len(group))
        above, below = (figure.add_subplot(2, len(groups), 1 + column + row * len(groups)) for row in range(2))
        above.set_title(title)
        above.bar(places, [m.ratio for m in group])
        above.axhline(1.0, color="black", linewidth=0.8)
        above.set_ylabel("time / reference's time")
        above.set_xticks(places, [""] * len(group))
        for name in ("opjit", "reference"):
            rates = [m.bytes / getattr(m, name) / 1e9 if m.bytes else float("nan") for m in group]
            below.plot(places, rates, marker=".", label=name)
        below.set_ylabel("GB/s")
        below.set_xticks(places, labels, rotation=90)
        below.legend()
    figure.savefig(file, format="png", dpi=120)

"""``opjit bench``: ops against their references in plain torch, in one run, validated first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_leaves, tree_map

from opjit import api, build, catalog, cli_json, plot
from opjit.errors import BadSetting
from opjit.op import Op, Workload
from opjit.samples import Sample, outcome

_ROUNDS = 9
_ROUND_SECONDS = 0.02
_COPIED = 1 << 26
_HEADER = f"{'workload':<26}{'opjit':>12}{'torch':>12}{'ratio':>8}{'GB/s':>9}{'of copy':>9}{'error':>11}{'torch error':>13}"


@dataclass(frozen=True)
class Line:
    """One measured workload: seconds a call, medians of interleaved rounds.

    Attributes:
        bytes: the fewest that the op must move; 0 where its time is not a matter of memory.
        of_copy: the bandwidth as a part of a plain copy's on the same device; None on the CPU.
        error, reference_error: the largest distance from the reference's result for float64 inputs, relative to that result.
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


def run(names: Sequence[str], device: str | None, only: str | None, json_file: Path | None,
        plot_file: Path | None = None) -> int:
    """Measure every workload of some ops and print tables; returns the command's exit code.

    Calls are made in inference mode. CUDA times are of calls issued back to back and synchronised at the end of a round, so a
    small workload shows the rate at which the host can issue it.
    """
    if plot_file is not None:
        plot.require()
    console = Console(width=110, highlight=False)
    lines = []
    copies: dict[str, float] = {}
    for op, each in catalog.named_on(names, device, console.print):
        called = api.get(op.qualified, each)
        console.print(f"[bold]{op.qualified} on {each}[/] ({_describe(each)})")
        if each == "cuda":
            copies[each] = copies.get(each) or _copy_bandwidth(each)
            console.print(f"a copy of float32 2^{_COPIED.bit_length() - 1}: {copies[each] / 1e9:.0f} GB/s")
        console.print(_HEADER)
        for workload in op.work(each):
            if only is None or only in workload.label:
                lines.append(_measure(op, called, each, workload, copies.get(each)))
                console.print(_shown(lines[-1]))
    if not lines:
        console.print("nothing was measured" + ("" if only is None else f": no workload's label contains {only!r}"))
        return 1
    try:
        if json_file is not None:
            json_file.write_text(cli_json.dump([asdict(line) for line in lines]))
        if plot_file is not None:
            plot.draw(lines, plot_file)
    except OSError as error:
        raise BadSetting(f"what was measured is not written: {error}; choose another file") from error
    return 0


def _describe(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} threads, torch {torch.__version__}"


def _shown(line: Line) -> str:
    bandwidth = f"{line.bytes / line.opjit / 1e9:.1f}" if line.bytes else ""
    of_copy = "" if line.of_copy is None else f"{line.of_copy:.3f}"
    return (f"{line.label:<26}{1e6 * line.opjit:>9.2f} us{1e6 * line.reference:>9.2f} us{line.ratio:>8.2f}{bandwidth:>9}{of_copy:>9}"
            f"{line.error:>11.1e}{line.reference_error:>13.1e}")


def _measure(op: Op, called: Callable[..., Any], device: str, workload: Workload, copy: float | None) -> Line:
    with torch.inference_mode():
        error, reference_error = _errors(op, called, workload)
        mine, theirs = _medians([called, op.plain], workload.args, workload.kwargs)
    of_copy = workload.bytes / mine / copy if copy and workload.bytes else None
    return Line(op.qualified, device, workload.label, mine, theirs, workload.bytes, of_copy, error, reference_error)


def _errors(op: Op, called: Callable[..., Any], workload: Workload) -> tuple[float, float]:
    """How far the op and its reference are from the exact result; stops where the op is plainly wrong."""
    args, kwargs = workload.args, workload.kwargs
    sample = Sample(args, kwargs)
    result, expected = outcome(called, op, sample), outcome(op.plain, op, sample)
    # Where every result takes many elements to make, its error grows as a random walk.
    longest = max(t.numel() for t in sample.tensors()) / max([1, *(t.numel() for t in _tensors(expected))])
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2 * max(1.0, longest ** 0.5), equal_nan=True,
                               msg=lambda text: f"{op.qualified} is wrong on {workload.label}: {text}")
    exact = _tensors(outcome(op.plain, op, Sample(*tree_map(_double, (args, kwargs)))))
    return _distance(_tensors(result), exact), _distance(_tensors(expected), exact)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _double(value: Any) -> Any:
    """A floating tensor in float64, and float64 for a floating dtype that is asked for; anything else as it is."""
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
    """Seconds a call of each function, which take turns."""
    build.import_builder(whole=True)  # as the timer would, with a remark
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()  # a Timer of its own accord measures with one
    timers = [Timer("f(*args, **kwargs)", globals={"f": f, "args": args, "kwargs": kwargs}, num_threads=threads) for f in functions]
    counts = [max(1, min(20_000, int(_ROUND_SECONDS / timer.timeit(3).median))) for timer in timers]
    rounds = [[timer.timeit(count).median for timer, count in zip(timers, counts, strict=True)] for _ in range(_ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by torch's copy of a large tensor."""
    source = torch.empty(_COPIED, device=device)
    target = torch.empty_like(source)
    [seconds] = _medians([target.copy_], (source,), {})
    return 2 * source.nbytes / seconds

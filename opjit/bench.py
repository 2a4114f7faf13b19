"""``opjit bench``: an op against its reference in plain torch, in one run, validated first."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.benchmark import Timer

from opjit import api, catalog
from opjit.op import Op, Workload

_ROUNDS = 9
_ROUND_SECONDS = 0.02


@dataclass(frozen=True)
class Line:
    """One measured workload: seconds a call, medians of interleaved rounds."""

    device: str
    label: str
    opjit: float
    reference: float
    bytes: int
    error: float
    reference_error: float

    @property
    def ratio(self) -> float:
        return self.opjit / self.reference


def run(name: str, device: str | None, only: str | None, json_file: Path | None) -> int:
    """Measure every workload of an op and print a table; returns the command's exit code.

    Calls are made in inference mode. CUDA times are of calls issued back to back and synchronised at the end of a round, so a
    small workload shows the rate at which the host can issue it.
    """
    op = catalog.find(name)
    names = [device] if device else op.devices()
    console = Console(width=110, highlight=False)
    lines = []
    for each in names:
        called = api.get(name, each)
        console.print(f"[bold]{op.qualified} on {each}[/] ({_describe(each)})\n"
                      f"{'workload':<18}{'opjit':>12}{'torch':>12}{'ratio':>8}{'GB/s':>9}{'error':>11}{'torch error':>13}")
        for workload in op.work(each):
            if only is None or only in workload.label:
                line = _measure(op, called, each, workload)
                lines.append(line)
                console.print(f"{line.label:<18}{1e6 * line.opjit:>9.2f} us{1e6 * line.reference:>9.2f} us{line.ratio:>8.2f}"
                              f"{line.bytes / line.opjit / 1e9:>9.1f}{line.error:>11.1e}{line.reference_error:>13.1e}")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    return 0


def _describe(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} threads, torch {torch.__version__}"


def _measure(op: Op, called: Callable[..., Any], device: str, workload: Workload) -> Line:
    args, kwargs = workload.args, workload.kwargs
    with torch.inference_mode():
        result, expected = called(*args, **kwargs), op.plain(*args, **kwargs)
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2 * max(1.0, args[0].numel() ** 0.5),
                                   msg=lambda text: f"{op.qualified} is wrong on {workload.label}: {text}")
        exact = op.plain(*(a.double() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        threads = torch.get_num_threads()  # a Timer of its own accord measures with one
        timers = [Timer("f(*args, **kwargs)", globals={"f": f, "args": args, "kwargs": kwargs}, num_threads=threads)
                  for f in (called, op.plain)]
        counts = [max(1, min(20_000, int(_ROUND_SECONDS / timer.timeit(3).median))) for timer in timers]
        rounds = [[timer.timeit(count).median for timer, count in zip(timers, counts, strict=True)] for _ in range(_ROUNDS)]
    mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    return Line(device, workload.label, mine, theirs, workload.bytes, _distance(result, exact), _distance(expected, exact))


def _distance(result: Any, exact: Any) -> float:
    """The largest absolute error, relative to the largest exact value."""
    scale = exact.double().abs().max().clamp_min(1e-300)
    return float(((result.double() - exact.double()).abs().max() / scale).item())

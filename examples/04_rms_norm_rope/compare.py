"""Compare the speed of rms_norm_rope with torch's ops and torch.compile: `python examples/04_rms_norm_rope/compare.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

import opjit

ROUNDS, SECONDS = 9, 0.02


def medians(functions: list[Callable[..., torch.Tensor]], args: tuple[object, ...]) -> list[float]:
    """Microseconds per call of each function. The calls are interleaved."""
    timers = [Timer("f(*args)", globals={"f": f, "args": args}, num_threads=torch.get_num_threads()) for f in functions]
    counts = [max(1, int(SECONDS / timer.timeit(3).median)) for timer in timers]
    rounds = [[1e6 * timer.timeit(count).median for timer, count in zip(timers, counts, strict=True)] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    [declared] = opjit.add_path(Path(__file__).resolve().parent)
    op, compiled = opjit.get(declared.qualified, device), torch.compile(declared.reference_function)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    print(f"microseconds on {machine}, torch {torch.__version__}\n{'':<22}{'opjit':>10}{'torch':>10}{'compile':>10}")
    with torch.inference_mode():
        for workload in declared.workloads_on(device):
            for other in (declared.reference_function, compiled):
                torch.testing.assert_close(op(*workload.args), other(*workload.args), rtol=1e-4, atol=1e-4)
            ours, eager, fused = medians([op, declared.reference_function, compiled], workload.args)
            print(f"{workload.label:<22}{ours:>10.1f}{eager:>10.1f}{fused:>10.1f}")


if __name__ == "__main__":
    main()

"""A matrix kernel in seven steps: `python examples/19_matrix_kernel/use.py` checks them, and `--measure` measures them on a GPU."""

import os
import statistics
import sys
from pathlib import Path

import torch

import opjit

opjit.add_path(Path(__file__).parent / "steps")
STEPS = {number: getattr(torch.ops.demo, f"step{number}") for number in range(1, 7)}
STEPS[7] = torch.ops.opjit.matmul
SIZE = 8192
ROUNDS = 7


def numbers(rows: int, columns: int, device: str) -> torch.Tensor:
    """Small integers, so that float32 sums are exact in any order."""
    return torch.randint(-3, 4, (rows, columns), device=device).to(torch.bfloat16)


def lacks_hopper(number: int, device: str) -> bool:
    return number in (5, 6) and device == "cuda" and torch.cuda.get_device_capability()[0] != 9


def check(device: str) -> list[int]:
    """Compare all steps with torch in float32, and return the steps that ran."""
    ran = []
    for number, step in STEPS.items():
        if lacks_hopper(number, device):
            print(f"step {number}: needs a GPU of compute capability 9.0")
            continue
        try:
            for m, n, k in ((128, 256, 64), (384, 256, 192)):
                x, weight = numbers(m, k, device), numbers(n, k, device)
                expected = (x.float() @ weight.t().float()).to(torch.bfloat16)
                assert torch.equal(step(x, weight.t()), expected), f"step {number} differs from torch"
        except opjit.errors.NoKernel:
            if device == "cuda":
                raise
            print(f"step {number}: needs a GPU, because opjit does not emulate its instructions")
            continue
        ran.append(number)
        print(f"step {number}: the same results as torch")
    return ran


def seconds(call, x: torch.Tensor, w: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call(x, w)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(steps: list[int]) -> None:
    """Print the speed of each step, and its share of the speed of torch.matmul, which calls cuBLAS."""
    x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16).t()
    calls = {"cuBLAS": torch.matmul} | {f"step {number}": STEPS[number] for number in steps}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            spent = seconds(call, x, w)
            if turn > 0:  # the first round warms up
                times[name].append(spent)
    fastest = statistics.median(times["cuBLAS"])
    print(f"M = N = K = {SIZE} on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, spent in times.items():
        median = statistics.median(spent)
        print(f"{name:<7}{2 * SIZE**3 / median / 1e12:8.1f} TFLOP/s{100 * fastest / median:7.1f} % of cuBLAS")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not os.environ.get("OPJIT_EMULATE"):
        sys.exit("no GPU is visible; set OPJIT_EMULATE=1 to run the first steps on the CPU")
    if device == "cpu" and "--measure" in sys.argv:
        sys.exit("--measure needs a GPU")
    steps = check(device)
    if "--measure" in sys.argv:
        measure(steps)


if __name__ == "__main__":
    main()

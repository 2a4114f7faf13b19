"""add_custom, round_ste and tensor_negate against eager torch, and on a GPU against copying memory.

    python tests/benchmarks/elementwise.py [--dtype float32 ...]

The peers are each op's reference: torch.add, (x > 0.5).to(x.dtype), torch.neg. Sides take turns in inference mode; a ratio is the
median of the rounds' ratios. Results are checked first. On the CPU both use the same threads; on a GPU a round is some calls
between two events, and `of copy` is the bytes per second against those of y.copy_(x) in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

import opjit
from opjit.catalog import registry

OPS = ("add_custom", "round_ste", "tensor_negate")
ROUNDS = 15
Side = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def arguments(name: str, power: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=device).manual_seed(power)
    count = 2 if name == "add_custom" else 1
    made = tuple(
        torch.rand(1 << power, generator=generator, device=device, dtype=torch.float32)
        for _ in range(count)
    )
    return tuple(x.to(dtype) if dtype.is_floating_point else x.mul(100).to(dtype) for x in made)


def sides_of(name: str, power: int, dtype: torch.dtype, device: str) -> dict[str, Side]:
    """Both sides and a copy, with the same data."""
    args = arguments(name, power, dtype, device)
    op = opjit.get(name, device)
    plain = registry.find(name).reference_function
    torch.testing.assert_close(op(*args), plain(*args), rtol=0, atol=0)
    return {
        "opjit": (op, args),
        "torch": (plain, args),
        "copy": (torch.Tensor.copy_, (torch.empty_like(args[0]), args[0])),
    }


def seconds_on_cuda(call: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(4):
        call(*args)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) / 4000)


def timer(call: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Timer:
    names = [f"a{index}" for index in range(len(args))]
    return Timer(
        f"call({', '.join(names)})",
        globals={"call": call, **dict(zip(names, args, strict=True))},
        num_threads=torch.get_num_threads(),
    )


def measure(sides: dict[str, Side], device: str) -> dict[str, list[float]]:
    """Seconds a call, by side and round."""
    spent: dict[str, list[float]] = {name: [] for name in sides}
    timers = {name: timer(*side) for name, side in sides.items()}
    counts = {name: max(1, int(0.01 / each.timeit(5).mean)) for name, each in timers.items()}
    for turn in range(ROUNDS + 1):
        for name in reversed(sides) if turn % 2 else sides:
            spent[name].append(
                seconds_on_cuda(*sides[name])
                if device == "cuda"
                else timers[name].timeit(counts[name]).mean
            )
    return {name: values[1:] for name, values in spent.items()}  # the first round warms up


def show(name: str, power: int, dtype: torch.dtype, device: str) -> None:
    sides = sides_of(name, power, dtype, device)
    spent = measure(sides, device)
    size = sides["copy"][1][0].nbytes
    moved = (1 + len(sides["opjit"][1])) * size
    copied = 2 * size
    median = {side: statistics.median(values) for side, values in spent.items()}
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(spent["opjit"], spent["torch"], strict=True)
    )
    line = (
        f"{device:<5}{name:<15}{str(dtype).removeprefix('torch.'):<9} 2^{power:<3}{1e6 * median['opjit']:>11.2f} us"
        f"{1e6 * median['torch']:>11.2f} us   {ratio:5.3f}x of torch's time"
    )
    if device == "cuda":
        line += f"   {moved / median['opjit'] / 1e9:5.0f} GB/s, {moved / median['opjit'] * median['copy'] / copied:5.3f}x of copy"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--dtype", nargs="*", default=["float32"])
    dtypes = [getattr(torch, name) for name in parser.parse_args().dtype]
    gpu = torch.version.cuda is not None and torch.cuda.is_available()
    with torch.inference_mode():
        for device, powers in (("cpu", (12, 24)), *([("cuda", (12, 26))] if gpu else [])):
            for name in OPS:
                for dtype in dtypes:
                    for power in powers:
                        if dtype.is_floating_point or name != "round_ste":
                            show(name, power, dtype, device)


if __name__ == "__main__":
    main()

"""Time the forward and the backward of one form of the LLTM cell, and print the minimum and the mean.

    python examples/05_lltm/benchmark.py c
    python examples/05_lltm/benchmark.py cuda -b 64 -f 128 -s 512
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from cells import LLTM, VARIANTS, State, device_of, make

SCALES = {"s": 1.0, "ms": 1e3, "us": 1e6}


def measure(cell: LLTM, x: torch.Tensor, state: State, runs: int, synchronize: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Seconds of each forward and each backward, after some that are not counted."""
    forward, backward = [], []
    for turn in range(runs + 10):
        cell.zero_grad()
        synchronize()
        start = time.perf_counter()
        new_h, new_cell = cell(x, state)
        synchronize()
        middle = time.perf_counter()
        (new_h.sum() + new_cell.sum()).backward()
        synchronize()
        end = time.perf_counter()
        if turn >= 10:
            forward.append(middle - start)
            backward.append(end - middle)
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=list(VARIANTS))
    parser.add_argument("-c", "--cuda", action="store_true", help="on a GPU (the variant `cuda` always is)")
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("-f", "--features", type=int, default=32)
    parser.add_argument("-s", "--state-size", type=int, default=128)
    parser.add_argument("-r", "--runs", type=int, default=100)
    parser.add_argument("--scale", choices=list(SCALES), default="us")
    parser.add_argument("-d", "--double", action="store_true", help="float64 instead of float32")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be at least 1")

    device, dtype = device_of(options.variant, options.cuda), torch.float64 if options.double else torch.float32
    cell = make(options.variant, options.features, options.state_size, dtype, device)
    x, *state = (torch.randn(options.batch_size, size, dtype=dtype, device=device, requires_grad=True)
                     for size in (options.features, options.state_size, options.state_size))
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = measure(cell, x, (state[0], state[1]), options.runs, synchronize)
    scale = SCALES[options.scale]
    forward, backward = (f"{scale * min(one):.3f}/{scale * sum(one) / len(one):.3f} {options.scale}" for one in times)
    print(f"Forward: {forward} | Backward {backward}")


if __name__ == "__main__":
    main()

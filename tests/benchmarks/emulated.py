"""What the emulation of a CUDA kernel without barriers costs: tensor_negate of 100,000 floats, unchecked and checked.

    python tests/benchmarks/emulated.py

Each is the median time of a call, after the result has been compared with torch's. The peer is torch.neg in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import alone, ratio, show

from opjit.catalog import registry
from opjit.emulate import build

ELEMENTS = 100_000
CALLS = 7
BARS = {False: 0.02, True: 0.5}  # seconds, by whether accesses are checked


def timed(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[float]:
    """Return the seconds of several calls, after one that is not timed."""
    torch.testing.assert_close(function(x), -x)
    found = []
    for _ in range(CALLS):
        started = time.perf_counter()
        function(x)
        found.append(time.perf_counter() - started)
    return found


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(ELEMENTS)
    op = registry.find("tensor_negate")
    rows = []
    peer = timed(torch.neg, x)
    for checked, bar in BARS.items():
        build.install_emulated(op, checked)
        name = "checked" if checked else "unchecked"
        seconds = timed(op.overload, x)
        rows += [alone(name, seconds, bar), ratio(f"{name}, over torch", seconds, peer)]
    show(f"An emulated kernel of {ELEMENTS:,} elements, seconds", rows, ("emulated", "torch"))


if __name__ == "__main__":
    main()

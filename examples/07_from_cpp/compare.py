"""Compare all_reduce in C++ (ATen) and in C (opjit): build time, size and speed.

    python compare.py           on the CPU
    python compare.py --cuda    on a GPU; builds the .cu files too

Both sides are built from nothing in temporary folders, checked against torch.sum, and then called in turn.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

HERE = Path(__file__).resolve().parent
Function = Callable[[torch.Tensor], torch.Tensor]


class Built(NamedTuple):
    """One side of the comparison: its op, the seconds until the first call, and its library."""

    op: Function
    seconds: float
    library: Path


def build_c(device: str, cache: Path) -> Built:
    os.environ["OPJIT_CACHE"] = str(cache)
    started = perf_counter()
    import opjit

    runpy.run_path(str(HERE / "c" / "op.py"))
    op = opjit.get("from_c::all_reduce", device)
    seconds = perf_counter() - started
    [library] = cache.rglob("from_c.all_reduce.so")
    return Built(op, seconds, library)


def build_cpp(device: str, folder: Path) -> Built:
    names = ["all_reduce.cpp", "all_reduce_cuda.cu"] if device == "cuda" else ["all_reduce.cpp"]
    started = perf_counter()
    from torch.utils.cpp_extension import load

    load(name="from_cpp", sources=[str(HERE / "cpp" / name) for name in names], extra_cflags=["-O3"], build_directory=str(folder),
         is_python_module=False)
    return Built(torch.ops.from_cpp.all_reduce.default, perf_counter() - started, folder / "from_cpp.so")


def check(op: Function, device: str) -> None:
    """Stop unless the sums are torch's."""
    for numel in (0, 1, 7, 1000, 100_003):
        x = torch.arange(numel, dtype=torch.int32, device=device) % 1000 - 300
        torch.testing.assert_close(op(x), x.sum(dtype=torch.int32).reshape(1))
    if device == "cpu":
        torch.testing.assert_close(op(x[::3]), x[::3].sum(dtype=torch.int32).reshape(1))


def calls(sides: list[Function], x: torch.Tensor) -> list[float]:
    """Median seconds per call of each side. The calls are interleaved."""
    timers = [Timer("op(x)", globals={"op": op, "x": x}) for op in sides]
    count = max(1, min(5000, int(0.02 / timers[0].timeit(3).mean)))
    rounds = [[timer.timeit(count).mean for timer in timers] for _ in range(15)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def show(what: str, cpp: float, c: float, unit: str, scale: float = 1.0) -> None:
    print(f"{what:<22}{cpp * scale:>12.5g} {unit:<3}{c * scale:>12.5g} {unit:<3}{cpp / c:>8.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    device = "cuda" if parser.parse_args().cuda else "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where pip puts ninja
    if device == "cuda":
        from opjit.recipe import toolchain

        os.environ["CUDA_HOME"] = toolchain.require_nvcc(None).root  # torch does not find it if nvcc is a wrapper script
    torch.zeros(1, device=device)
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        c = build_c(device, Path(cache))  # first, so that its time includes the import of torch's builder
        cpp = build_cpp(device, Path(folder))
        for side in (c, cpp):
            check(side.op, device)
        print(f"all_reduce on {device}, torch {torch.__version__}\n{'':<22}{'C++':>16}{'C':>16}{'C++ / C':>9}")
        show("build", cpp.seconds, c.seconds, "s")
        show("library", cpp.library.stat().st_size, c.library.stat().st_size, "KiB", 1 / 1024)
        for power in (3, 24):
            x = torch.arange(1 << power, dtype=torch.int32, device=device)
            show(f"call, 2^{power} elements", *calls([cpp.op, c.op], x), "us", 1e6)


if __name__ == "__main__":
    main()

"""How near allreduce comes to a plain read of the same memory on a GPU.

    python tests/benchmarks/bandwidth.py

The peer is the op read16 (ops/read16): 16-byte loads of every element, nothing kept. Both run in CUDA graphs over 1 GiB of
normal float32, in turn; the medians of the rounds are compared. The bar is 1.03x of the read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from common import HERE

import opjit
from opjit.catalog import registry

ROUNDS = 15
CALLS = 4
BAR = 1.03


def recorded(op: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.cuda.CUDAGraph:
    op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            op(x)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(1e3 * start.elapsed_time(end) / CALLS)


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA GPU is visible: nothing to measure")
        return
    registry.declare_folder(HERE / "ops" / "read16")
    x = torch.randn(1 << 28, device="cuda")
    ops: dict[str, Callable[..., torch.Tensor]] = {
        "read16": opjit.get("opjit_bench::read16", "cuda"),
        "allreduce": opjit.get("allreduce", "cuda"),
        "torch.sum": torch.sum,
    }
    torch.testing.assert_close(ops["allreduce"](x), x.double().sum().float(), rtol=1e-4, atol=1.0)
    with torch.inference_mode():
        graphs = {name: recorded(op, x) for name, op in ops.items()}
        times: dict[str, list[float]] = {name: [] for name in ops}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                times[name].append(microseconds(graph))
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"float32 2^28 on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, value in median.items():
        print(
            f"{name:<10} {value:8.1f} us  {x.numel() * 4 / value / 1e3:7.0f} GB/s  {value / median['read16']:.3f}x of the read"
        )
    ratio = median["allreduce"] / median["read16"]
    print(
        f"allreduce against the read: {ratio:.3f}x, bar {BAR}x: {'PASS' if ratio <= BAR else 'FAIL'}"
    )


if __name__ == "__main__":
    main()

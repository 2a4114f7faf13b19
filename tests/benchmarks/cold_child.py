"""One side of cold.py, in a process of its own: build and load `allreduce`, check its sums, print the seconds as JSON.

The clock starts after `import torch` and, on a GPU, after the CUDA context was made: neither is any side's work.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from common import DTYPES, PEERS, load_peer

from opjit.wanted import target_of

Sum = Callable[[torch.Tensor], torch.Tensor]

AGAIN = """
import opjit

@opjit.op("opjit_bench::allreduce(Tensor x, *, ScalarType? dtype=None) -> Tensor")
def allreduce(x, *, dtype=None):
    return x.new_empty((), dtype=dtype)
"""


def opjit_side(scratch: Path, device: str) -> tuple[dict[str, float], list[Sum]]:
    """A cold get, then on the CPU another one: of the same file, as an op of another namespace."""
    start = perf_counter()
    import opjit

    ops = [opjit.get("allreduce", device)]
    times = {"first": perf_counter() - start}
    if device == "cpu":
        from opjit.catalog import registry

        for name in ("allreduce.c", "allreduce.h", "lanes.h"):
            shutil.copy(registry.find("allreduce").folder / name, scratch)
        (scratch / "op.py").write_text(AGAIN)
        runpy.run_path(str(scratch / "op.py"))
        start = perf_counter()
        ops.append(opjit.get("opjit_bench::allreduce", device))
        times["next"] = perf_counter() - start
    return times, list(ops)


def cpp_side(scratch: Path, device: str) -> tuple[dict[str, float], list[Sum]]:
    """torch.utils.cpp_extension.load of the tutorial form; for CUDA of its C++ file and its CUDA file."""
    start = perf_counter()
    load_peer(
        ["allreduce_ext.cpp"] if device == "cpu" else ["allreduce_ext.cpp", "allreduce_ext.cu"],
        str(scratch),
    )
    op = torch.ops.peer.allreduce.default
    return {"first": perf_counter() - start}, [op]


def tvm_side(scratch: Path, device: str) -> tuple[dict[str, float], list[Sum]]:
    """tvm_ffi.cpp.load_inline."""
    start = perf_counter()
    import tvm_ffi.cpp

    module = tvm_ffi.cpp.load_inline(
        name="peer",
        cpp_sources=(PEERS / "allreduce_tvm.cc").read_text(),
        functions="allreduce",
        build_directory=str(scratch),
    )
    op = module.allreduce
    return {"first": perf_counter() - start}, [op]


ONE = """
static __global__ void scale_kernel(const float *from, float *to, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = a * from[i];
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, (float)a, x->numel);
    return OPJIT_LAUNCHED();
}
"""


def one_side(arch: str | None) -> dict[str, float]:
    """An op of one CUDA kernel, cold, then edited: to its result on a GPU, to its entry without one."""
    from opjit import request

    times = {}
    x = torch.ones(1000, device="cpu" if arch else "cuda")
    for name, code in (("first", ONE), ("next", ONE.replace("a * from", "a + from"))):
        start = perf_counter()
        import opjit

        scale = opjit.inline("opjit_bench::scale(Tensor x, float a) -> Tensor", cuda=code, like="x")
        if arch:
            request.entry(scale, target_of(None, arch))
        else:
            assert scale(x, 3.0)[0].item() == (3.0 if name == "first" else 4.0)
        times[name] = perf_counter() - start
    return times


def build_only(arch: str) -> dict[str, float]:
    """opjit's side on a machine without a GPU: as `opjit get allreduce --arch` does."""
    start = perf_counter()
    from opjit import request
    from opjit.catalog import registry

    request.entry(registry.find("allreduce"), target_of(None, arch))
    return {"first": perf_counter() - start}


def check(op: Sum, device: str) -> None:
    """Stop unless the sums are torch's."""
    for dtype in DTYPES:
        for numel in (0, 1, 8, 100_003):
            x = (torch.arange(numel, device=device) % 3).to(dtype)
            torch.testing.assert_close(op(x), torch.sum(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("opjit", "one", "cpp", "tvm"))
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("scratch", type=Path, help="an empty folder")
    parser.add_argument("--arch", help="build for this arch and run nothing, where there is no GPU")
    options = parser.parse_args()
    if options.arch and options.side == "opjit":
        print(json.dumps(build_only(options.arch)))
        return
    if options.device == "cuda" and not options.arch:
        torch.zeros(1, device="cuda")
    if options.side == "one":
        print(json.dumps(one_side(options.arch)))
        return
    side = {"opjit": opjit_side, "cpp": cpp_side, "tvm": tvm_side}[options.side]
    times, ops = side(options.scratch, options.device)
    for op in ops:
        if not options.arch:
            check(op, options.device)
    print(json.dumps(times))


if __name__ == "__main__":
    main()

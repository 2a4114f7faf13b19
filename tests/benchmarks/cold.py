"""What the first use of an op costs: nothing cached, a fresh process, each side with its own imports.

    python tests/benchmarks/cold.py           the C op
    python tests/benchmarks/cold.py --cuda    the CUDA op; without a GPU both sides build for sm_90 and nothing runs

Every round starts one process for each side, with an empty cache. Its clock starts after `import torch` (on a GPU after
the CUDA context was made) and stops when the op can be called; then the sums are checked against torch.sum. The sides:

    opjit     opjit.get("allreduce"); with --cuda also opjit.inline of an op with one kernel, to its result, and once more, edited
    C++       torch.utils.cpp_extension.load of the same op in the tutorial's form: torch/extension.h and -O3
    tvm-ffi   tvm_ffi.cpp.load_inline of the same function, without strides and dtype= (pip install apache-tvm-ffi)
    nvcc      a bare nvcc -shared of one kernel and its launch
    gcc       a bare gcc -O3 -shared -fPIC of the op's C file, against the next cold get in a process that did one

The C++ side takes half a minute and more a time, so it has fewer rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from common import HERE, Row, child, ratio, show

Times = dict[str, list[float]]
ONE = """
static __global__ void scale_kernel(const float *from, float *to, float a, long n)
{
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x)
        to[i] = a * from[i];
}

extern "C" int scale(const float *from, float *to, float a, long n, cudaStream_t stream)
{
    scale_kernel<<<(int)((n + 255) / 256), 256, 0, stream>>>(from, to, a, n);
    return cudaGetLastError();
}
"""


def cold(side: str, device: str, arch: str | None, times: Times) -> None:
    """One fresh process of one side; its seconds are added to `times` under "<side>.first" and "<side>.next"."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as cache:
        arguments = [side, device, scratch, *(["--arch", arch] if arch else [])]
        env = {"OPJIT_CACHE": cache, "TVM_FFI_CACHE_DIR": cache}
        if device == "cuda":
            env |= cuda_environment()
        for name, value in child(HERE / "cold_child.py", *arguments, env=env).items():
            times.setdefault(f"{side}.{name}", []).append(value)


def cuda_environment() -> dict[str, str]:
    """The same arch for both sides, and the toolkit's folder, which torch misses where nvcc is a wrapper script."""
    from opjit.recipe import toolchain

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    nvcc = toolchain.require_nvcc(None)
    return {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "CUDA_HOME": nvcc.root}


def bare_gcc() -> float:
    """Seconds of gcc for allreduce.c."""
    from opjit.catalog import registry

    source = registry.find("allreduce").folder / "allreduce.c"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "gcc",
            "-O3",
            "-shared",
            "-fPIC",
            f"-I{source.parent.parent}",
            "-o",
            f"{folder}/bare.so",
            str(source),
        ]
        start = perf_counter()
        subprocess.run(command, check=True)
        return perf_counter() - start


def bare_nvcc(arch: str | None) -> float:
    """Seconds of nvcc for a file with one kernel and its launch."""
    from opjit.recipe import toolchain

    major, minor = torch.cuda.get_device_capability() if arch is None else (9, 0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "one.cu").write_text(ONE)
        command = [
            f"{toolchain.require_nvcc(None).root}/bin/nvcc",
            f"-arch=sm_{major}{minor}",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "one.cu",
        ]
        start = perf_counter()
        subprocess.run(command, cwd=folder, check=True)
        return perf_counter() - start


def measure_cpu(rounds: int, slow_rounds: int) -> list[Row]:
    times: Times = {}
    has_tvm = importlib.util.find_spec("tvm_ffi") is not None
    for turn in range(rounds):
        cold("opjit", "cpu", None, times)
        times.setdefault("gcc", []).append(bare_gcc())
        if has_tvm:
            cold("tvm", "cpu", None, times)
        if turn < slow_rounds:
            cold("cpp", "cpu", None, times)
    rows = []
    if slow_rounds:
        rows.append(
            ratio(
                "C op, against C++ and torch/extension.h",
                times["opjit.first"],
                times["cpp.first"],
                1 / 50,
            )
        )
    if has_tvm:
        rows.append(ratio("C op, against tvm-ffi", times["opjit.first"], times["tvm.first"], 1 / 3))
    rows.append(ratio("the next C op, against bare gcc", times["opjit.next"], times["gcc"], 1.5))
    return rows


def measure_cuda(rounds: int, slow_rounds: int) -> list[Row]:
    times: Times = {}
    arch = None if torch.cuda.is_available() else "sm_90"
    for turn in range(rounds):
        cold("one", "cuda", arch, times)
        cold("opjit", "cuda", arch, times)
        times.setdefault("nvcc", []).append(bare_nvcc(arch))
        if turn < slow_rounds:
            cold("cpp", "cuda", arch, times)
    built = f" (built for {arch}, not run)" if arch else ""
    rows = [
        ratio(f"one CUDA kernel{built}, against bare nvcc", times["one.first"], times["nvcc"], 1),
        ratio(
            "the same kernel, edited, against bare nvcc", times["one.next"], times["nvcc"], 1 / 3
        ),
    ]
    if slow_rounds:
        rows.append(
            ratio(
                f"allreduce{built}, against C++/CUDA with torch/extension.h",
                times["opjit.first"],
                times["cpp.first"],
                1 / 30,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cuda", action="store_true", help="measure the CUDA op instead of the C op"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--slow-rounds",
        type=int,
        default=1,
        help="rounds that include the C++ side; 0 leaves it out of the C op's table",
    )
    options = parser.parse_args()
    if options.cuda and options.slow_rounds and torch.version.cuda is None:
        parser.error("the C++/CUDA side needs a CUDA build of torch; --slow-rounds 0 leaves it out")
    os.environ.pop("OPJIT_ARCH", None)
    measure = measure_cuda if options.cuda else measure_cpu
    rows = measure(options.rounds, min(options.rounds, options.slow_rounds))
    show("A cold get in a fresh process, imports included (medians)", rows)


if __name__ == "__main__":
    main()

"""What opjit.load costs beside torch.utils.cpp_extension.load of the same pybind11 module over torch/extension.h.

    python tests/benchmarks/dropin.py           one C++ file
    python tests/benchmarks/dropin.py --cuda    a C++ file and a CUDA file; without a GPU both sides build for sm_90 and no kernel runs

    warm    the extension is built already: each side's import and load, in a fresh process
    cold    nothing is built: the same, half a minute a time, so with fewer rounds
    call    a function of two numbers, which shows what the binding costs

The clock starts after `import torch` and stops when the module is there; then one result is checked. The sides take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from cold import cuda_environment
from common import HERE, Row, child, ratio, show

SOURCE = """\
#include <torch/extension.h>

at::Tensor scaled(at::Tensor x, double a) { return x * a; }

long plus(long a, long b) { return a + b; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("scaled", &scaled, "x times a");
    m.def("plus", &plus);
}
"""
KERNEL = """\
#include <torch/extension.h>

template <typename T> __global__ void scale_kernel(const T *from, T *to, T a, long n)
{
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x)
        to[i] = a * from[i];
}

at::Tensor scaled(at::Tensor x, double a)
{
    TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "expected a contiguous CUDA tensor");
    at::Tensor y = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scaled", [&] {
        scale_kernel<scalar_t><<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), a, x.numel());
    });
    return y;
}
"""
SIDES = ("opjit", "torch")


def loaded(side: str, folder: Path, cuda: bool) -> dict[str, float]:
    """Seconds of one fresh process of a side, whose builds are in the folder, and of a call."""
    (folder / side).mkdir(exist_ok=True)
    env = {"OPJIT_CACHE": str(folder / side), "TORCH_EXTENSIONS_DIR": str(folder / side)}
    sources = [
        str(folder / name) for name in (("scaled.cpp", "scaled.cu") if cuda else ("scaled.cpp",))
    ]
    return child(
        HERE / "dropin_child.py", side, *sources, env=env | (cuda_environment() if cuda else {})
    )


def measure(rounds: int, cold_rounds: int, cuda: bool) -> list[Row]:
    cold: dict[str, list[float]] = {side: [] for side in SIDES}
    warm: dict[str, list[float]] = {side: [] for side in SIDES}
    call: dict[str, list[float]] = {side: [] for side in SIDES}
    body = SOURCE.replace("{ return x * a; }", ";") if cuda else SOURCE
    for turn in range(cold_rounds):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "scaled.cpp").write_text(body, encoding="utf-8")
            (folder / "scaled.cu").write_text(KERNEL, encoding="utf-8")
            for side in SIDES if turn % 2 else reversed(SIDES):
                cold[side].append(loaded(side, folder, cuda)["seconds"])
            if turn == 0:
                for _ in range(rounds):
                    for side in SIDES:
                        found = loaded(side, folder, cuda)
                        warm[side].append(found["seconds"])
                        call[side].append(found["call"])
    return [
        ratio("warm, in a fresh process", warm["opjit"], warm["torch"], 0.2),
        ratio("cold", cold["opjit"], cold["torch"], 1 / 30 if cuda else 1 / 20),
        ratio("call", call["opjit"], call["torch"], 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="of warm loads")
    parser.add_argument("--cold-rounds", type=int, default=3)
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    show(
        "opjit.load against torch.utils.cpp_extension.load, imports included (medians)",
        measure(options.rounds, max(1, options.cold_rounds), options.cuda),
    )


if __name__ == "__main__":
    main()

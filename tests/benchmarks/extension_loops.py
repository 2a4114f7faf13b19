"""A C++ extension that opjit builds the fast way runs as fast as one built with torch/extension.h.

    python tests/benchmarks/extension_loops.py      two builds, one of them with torch's headers: about a minute

Seven loops ask tensors for what loops ask for: sizes, pointers, elements, copies. Both modules are in one process and take turns; each time
is the best of five calls. Results are compared first.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Row, path_with_tools, ratio, show
from torch.utils import cpp_extension

import opjit

SOURCE = """
double numel(torch::Tensor x) {
    const float *p = x.data_ptr<float>();
    double sum = 0;
    for (int64_t i = 0; i < x.numel(); ++i) sum += p[i];
    return sum;
}
double accessor(torch::Tensor x) {
    auto a = x.accessor<float, 2>();
    double sum = 0;
    for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) sum += a[i][j];
    return sum;
}
int64_t queries(torch::Tensor x) {
    int64_t sum = 0;
    for (int64_t i = 0; i < 1000000; ++i)
        sum += x.dim() + x.stride(0) + x.is_contiguous() + (x.scalar_type() == torch::kFloat) + x.is_cuda() + (i & x.size(0));
    return sum;
}
int64_t copies(torch::Tensor x) {
    std::vector<torch::Tensor> many(100000, x), again = many;
    return again.size() + many.size();
}
double pointer(torch::Tensor x) {
    double sum = 0;
    for (int64_t i = 0; i < x.numel(); ++i) sum += x.data_ptr<float>()[i];
    return sum;
}
double items(torch::Tensor x) {
    double sum = 0;
    for (int64_t i = 0; i < 1000; ++i) sum += x[i][0].item<float>();
    return sum;
}
int64_t call(int64_t x) { return x + 1; }
"""
LOOPS = {
    "numel": "i < x.numel(), 10^6 elements",
    "accessor": "accessor, i < x.size(0), 10^6",
    "queries": "dim, stride, dtype, 10^6 each",
    "copies": "10^5 copies of a tensor, twice",
    "pointer": "x.data_ptr<float>()[i], 10^6",
    "items": "x[i][0].item<float>(), 10^3",
    "call": "a call from Python",
}


def built() -> tuple[Any, Any]:
    """Both modules; opjit's must not be built with torch's headers."""
    arguments: dict[str, Any] = {"functions": list(LOOPS), "extra_cflags": ["-O2"]}
    ours = opjit.load_inline("extension_loops", SOURCE, **arguments)
    manifest = json.loads(
        Path(ours.__file__).with_name("manifest.json").read_text(encoding="utf-8")
    )
    if "torch's own" in manifest["built_with"]["headers"]:
        raise SystemExit("opjit built it with torch's own headers: there is nothing to compare")
    return ours, cpp_extension.load_inline("torchs_loops", SOURCE, **arguments)


def best(run: Callable[[], object], calls: int) -> float:
    return min(timeit.repeat(run, number=calls, repeat=5)) / calls


def measure(rounds: int) -> list[Row]:
    ours, peer = built()
    x = torch.rand(1000, 1000)
    rows = []
    for name, what in LOOPS.items():
        function = getattr(ours, name)
        peers = getattr(peer, name)
        argument: Any = 1 if name == "call" else x
        assert function(argument) == peers(argument), name
        times: dict[Any, list[float]] = {function: [], peers: []}
        for turn in range(rounds):
            for one in (function, peers) if turn % 2 else (peers, function):
                times[one].append(
                    best(functools.partial(one, argument), 10000 if name == "call" else 1)
                )
        rows.append(ratio(what, times[function], times[peers], 1.1))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    os.environ["PATH"] = path_with_tools()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OPJIT_CACHE=f"{folder}/opjit", TORCH_EXTENSIONS_DIR=f"{folder}/torch")
        show("Loops of a C++ extension", measure(arguments.rounds), ("opjit", "torch"))


if __name__ == "__main__":
    main()

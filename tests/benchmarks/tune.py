"""Variants of a transpose, from an empty cache to the choice: compiled and measured, then found by a second process.

    python tests/benchmarks/tune.py [--device cuda] [--most 288] [--size 4096]

The bars: 288 variants in 20 s on 16 cores and an H200, imports apart; a later process takes at most 50 ms longer to its first result than
one that runs the first variant without a choice, and builds and measures nothing; the chosen variant takes at most 2 % longer than the best
of all: each is measured beside it, and the best of these at length. Results are checked first. All files are in a folder that is removed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from common import alone, child, difference, ratio, show

OP_PY = """
import itertools, os, torch, opjit

@opjit.op("tuned::transpose(Tensor x) -> Tensor")
def transpose(x):
    return x.new_empty(x.shape[::-1])

number = itertools.count()

def among(**values):
    return next(number) < int(os.environ["MOST"])

transpose.variants("cpu", TILE_I=(4, 8, 16, 32, 64, 128), TILE_J=(4, 8, 16, 32, 64, 128), UNROLL=(1, 2, 4, 8), ORDER=(0, 1))(among)
number = itertools.count()
transpose.variants("cuda", TILE_I=(16, 32, 64, 128), TILE_J=(16, 32, 64), ROWS=(2, 4, 8, 16), PAD=(0, 1), UNROLL=(1, 2, 4))(among)
"""
C = """
#include "opjit.h"

#define PRAGMA(text) _Pragma(#text)
#define UNROLLED(n) PRAGMA(GCC unroll n) /* gcc knows no macro in a line of #pragma */

opjit_status transpose_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous && x->dim == 2, "transpose takes a contiguous float32 matrix");
    const int64_t rows = x->sizes[0], columns = x->sizes[1], sizes[] = {columns, rows};
    OPJIT_TRY(opjit_empty(out, 2, sizes, x->dtype, x));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    for (int64_t i0 = 0; i0 < rows; i0 += TILE_I)
        for (int64_t j0 = 0; j0 < columns; j0 += TILE_J) {
            const int64_t i1 = i0 + TILE_I < rows ? i0 + TILE_I : rows, j1 = j0 + TILE_J < columns ? j0 + TILE_J : columns;
            if (ORDER)
                for (int64_t i = i0; i < i1; i++)
                    UNROLLED(UNROLL)
                    for (int64_t j = j0; j < j1; j++)
                        to[j * rows + i] = from[i * columns + j];
            else
                for (int64_t j = j0; j < j1; j++)
                    UNROLLED(UNROLL)
                    for (int64_t i = i0; i < i1; i++)
                        to[j * rows + i] = from[i * columns + j];
        }
    return OPJIT_OK;
}
"""
CUDA = """
#include "opjit_cuda.h"

#define PRAGMA(text) _Pragma(#text)
#define UNROLLED(n) PRAGMA(unroll n)

static __global__ void transpose(const float *from, float *to, int64_t rows, int64_t columns)
{
    __shared__ float tile[TILE_I][TILE_J + PAD];
    const int64_t i0 = (int64_t)blockIdx.y * TILE_I, j0 = (int64_t)blockIdx.x * TILE_J;
    UNROLLED(UNROLL)
    for (int i = threadIdx.y; i < TILE_I; i += ROWS)
        if (i0 + i < rows && j0 + threadIdx.x < columns)
            tile[i][threadIdx.x] = from[(i0 + i) * columns + j0 + threadIdx.x];
    __syncthreads();
    UNROLLED(UNROLL)
    for (int k = threadIdx.y * TILE_J + threadIdx.x; k < TILE_I * TILE_J; k += ROWS * TILE_J)
        if (i0 + k % TILE_I < rows && j0 + k / TILE_I < columns)
            to[(j0 + k / TILE_I) * rows + i0 + k % TILE_I] = tile[k % TILE_I][k / TILE_I];
}

opjit_status transpose_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous && x->dim == 2, "transpose takes a contiguous float32 matrix");
    const int64_t rows = x->sizes[0], columns = x->sizes[1], sizes[] = {columns, rows};
    OPJIT_TRY(opjit_empty(out, 2, sizes, x->dtype, x));
    const dim3 blocks((unsigned)((columns + TILE_J - 1) / TILE_J), (unsigned)((rows + TILE_I - 1) / TILE_I));
    transpose<<<blocks, dim3(TILE_J, ROWS), 0, stream>>>((const float *)x->data, (float *)out->data, rows, columns);
    return OPJIT_LAUNCHED();
}
"""


def call(folder: str, device: str, size: int, exhaustive: bool) -> dict[str, Any]:
    """In a process of its own: the seconds to the first result, the builds, the choice; and how much longer it takes than the best."""
    import torch

    import opjit
    from opjit import backends, tune
    from opjit.measure.timing import measure, plan_of
    from opjit.store import usage
    from opjit.store.store import Store, default_root

    [op] = opjit.add_path(folder)
    backend = backends.for_device(device)
    x = torch.rand(size, size, device=device)
    torch.ones(1, device=device).sum().item()
    started = perf_counter()
    result = op(x)
    first = perf_counter() - started
    assert torch.equal(result, x.T)
    counts = dict(zip(usage.KINDS, usage.total(Store(default_root()).base)[1:], strict=True))
    found = {"first": first, "builds": counts["builds"], "open": len(op.loaded[device].variants)}
    if not exhaustive:
        return found
    with op.lock, torch.inference_mode():
        chosen = tune.measure_or_read(
            op, backend, op.loaded[device].registered.opjit_force_variant(None), ((x,), {})
        )
        assert chosen is not None
        tune._build_variants(op, backend, Store(default_root()))
        force = op.loaded[device].registered.opjit_force_variant
        sides = {
            name: partial(tune._call, force, kernel, op.overload)
            for name, kernel in op.loaded[device].variants.items()
        }
        plan = plan_of({}, ((x,), {}), device)
        medians = dict[str, float]()
        for each in sides:
            two = measure(
                replace(
                    plan,
                    sides={name: sides[name] for name in dict.fromkeys((chosen.variant, each))},
                    seconds=0.005,
                )
            )
            medians[each] = two[each].median / two[chosen.variant].median
        best = min(medians, key=medians.__getitem__)
        two = measure(
            replace(
                plan,
                sides={name: sides[name] for name in dict.fromkeys((chosen.variant, best))},
                rounds=41,
            )
        )
    return {
        **found,
        "chosen": chosen.variant,
        "best": best,
        "worst": max(medians.values()),
        "of_chosen": two[chosen.variant].seconds,
        "of_best": two[best].seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most", type=int, default=288)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(
            json.dumps(
                call(given.child[0], given.device, given.size, given.child[1] == "exhaustive")
            )
        )
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "transpose")
        folder.mkdir()
        for name, text in (("op.py", OP_PY), ("transpose.c", C), ("transpose.cu", CUDA)):
            (folder / name).write_text(text, encoding="utf-8")

        def run(kind: str = "call", **more: str) -> dict[str, Any]:
            return child(
                Path(__file__),
                "--device",
                given.device,
                "--size",
                str(given.size),
                "--child",
                str(folder),
                kind,
                env={
                    "OPJIT_CACHE": f"{place}/cache",
                    "MOST": str(given.most),
                    "OPJIT_CPP_AUTOGRAD": "0",
                    **more,
                },
            )

        cold = run()
        # The rest takes minutes.
        print(
            f"{cold['open']} variants are built and measured after {cold['first']:.1f} s",
            flush=True,
        )
        later = [(run(OPJIT_OFFLINE="1"), run(OPJIT_TUNE="0")) for _ in range(5)]
        found = run("exhaustive")
    warm, plain = ([each["first"] for each in side] for side in zip(*later, strict=True))
    assert all(
        each["builds"] == cold["builds"] and each["open"] <= 1 for pair in later for each in pair
    ), "one built or measured anew"
    show(
        f"{cold['open']} variants of a transpose of {given.size}^2 float32, {given.device}",
        [
            alone("built and measured, to the first result", [cold["first"]], 20.0),
            difference("a later process, to its first result", warm, plain, 0.05),
            ratio(
                "a call of the chosen variant, of the best",
                found["of_chosen"],
                found["of_best"],
                1.02,
            ),
        ],
        ("chosen", "without"),
    )
    print(
        f"chosen {found['chosen']}; best {found['best']}; the slowest that ran takes {found['worst']:.2f} of the chosen one's time"
    )


if __name__ == "__main__":
    main()

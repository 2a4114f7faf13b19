"""Verdicts a minute, against torch's load_inline with a process for each: python tests/benchmarks/judge.py [cpu|cuda] [SECONDS] [alone]

C ops on a CPU; on a GPU kernels with a rule to launch them, CUDA ops and KernelBench's kind of Python, and whether each cheat in CUDA
fails. Every candidate's text is new, and as many are on their way as keep all CPUs busy. Each row takes SECONDS, 30 by default, and a
peer at least one candidate. A row also shows the memory, descriptors and folders of the judge before and after all candidates: with
SECONDS for 10,000 candidates, a leak would show. The peer does less: it compiles, compares one call with allclose, and times one loop
in the candidate's process. With `alone`, neither the peer nor the cheats run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import common
import torch

from opjit.builder import budget
from opjit.judge import Judge

HERE = Path(__file__).parents[1] / "judge"
SCALE = str(HERE / "scale")
C = """#include "opjit.h"
opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++) /* NUMBER */
        ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i];
    return OPJIT_OK;
}
"""
KERNEL = """// opjit: launch scale(x, out, a, x.numel) grid=(x.numel + 255) / 256 block=256
__global__ void scale(const float *from, float *to, float a, int64_t n)
{
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; /* NUMBER */
    if (i < n)
        to[i] = a * from[i];
}
"""
CUDA = """#include "opjit_cuda.h"
static __global__ void scale_kernel(const float *from, float *to, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n) /* NUMBER */
        to[i] = a * from[i];
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, (float)a, x->numel);
    return OPJIT_LAUNCHED();
}
"""
MODEL = """import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.randn(16, 16384)]

def get_init_inputs():
    return []
"""
MODEL_NEW = '''import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

cuda = """
#include <torch/extension.h>
__global__ void relu_kernel(const float *from, float *to, int64_t n)
{
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; /* NUMBER */
    if (i < n)
        to[i] = from[i] > 0 ? from[i] : 0;
}

torch::Tensor relu(torch::Tensor x)
{
    auto out = torch::empty_like(x);
    relu_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    return out;
}
"""
own = load_inline("own_relu_NUMBER", "torch::Tensor relu(torch::Tensor x);", cuda, functions=["relu"])

class ModelNew(nn.Module):
    def forward(self, x):
        return own.relu(x)
'''
ON_A_CPU = '''from torch.utils.cpp_extension import load_inline
own = load_inline("own_relu_NUMBER", """torch::Tensor relu(torch::Tensor x) {
    auto out = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); i++) /* NUMBER */
        out.data_ptr<float>()[i] = x.data_ptr<float>()[i] > 0 ? x.data_ptr<float>()[i] : 0;
    return out;
}""", functions=["relu"])
'''
PEERS_CHECK = """
import time, torch
x = torch.randn(16, 16384, device="DEVICE")
assert torch.allclose(own.relu(x), torch.relu(x))
started = time.perf_counter()
for _ in range(100):
    own.relu(x)
if x.is_cuda:
    torch.cuda.synchronize()
"""


async def each_takes(
    ask: Callable[[str], Awaitable[str]], text: str, lanes: int, seconds: float
) -> float:
    """Ask for new texts in so many lanes for some seconds, and print the words of all. Returns the seconds for each."""
    stamps = itertools.count(time.time_ns() % 1_000_000_000)
    words = Counter[str]()

    async def lane() -> None:
        first = True
        while first or time.perf_counter() - started < seconds:
            first = False
            words[await ask(text.replace("NUMBER", str(next(stamps))))] += 1

    started = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(lanes)))
    each = (time.perf_counter() - started) / words.total()
    print(
        f"{60 / each:7.1f} a minute: {', '.join(f'{count} {word}' for word, count in words.items())}",
        flush=True,
    )
    return each


async def verdicts(what: str, task: str, text: str, device: str, seconds: float) -> float:
    """Judge one kind of candidates, without the time of the judge's start. Returns the seconds for each."""
    async with Judge(task, device=device) as judge:

        async def ask(text: str) -> str:
            verdict = await judge(text)
            assert verdict.verdict in ("correct", "noisy"), verdict
            return verdict.verdict

        last = await judge(text.replace("NUMBER", "0"))
        print(f"{what}\n{last.json()}")
        before = footprint(judge)
        each = await each_takes(ask, text, judge.workers + 1, seconds)
        print(f"before: {before}\nafter:  {footprint(judge)}")
        return each


def footprint(judge: Judge) -> str:
    """What the judge's processes and those that fork workers hold: memory, descriptors, folders of workers."""
    of_gpus = judge.processes.processes if judge.processes else []
    judges = [os.getpid(), *(process.pid for process in of_gpus)]
    parts = [f"judge {held_by(judge)}" for judge in judges]
    for judge_process in judges:
        for child in Path(f"/proc/{judge_process}/task").glob("*/children"):
            for number in child.read_text("ascii").split():
                words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
                if b"opjit.judge.keeper" in words:
                    folders = len([*Path(os.fsdecode(words[-2])).iterdir()])
                    parts.append(f"zygote {held_by(int(number))}, {folders} folders of workers")
    return "; ".join(parts)


def held_by(process: int) -> str:
    """The memory and descriptors of a process."""
    status = Path(f"/proc/{process}/status").read_text("ascii")
    kibibytes = int(status.partition("VmRSS:")[2].split()[0])
    descriptors = len([*Path(f"/proc/{process}/fd").iterdir()])
    return f"{kibibytes / 1024:.0f} MiB, {descriptors} descriptors"


async def peer(device: str, seconds: float) -> float:
    """Have a process for each candidate, as many as CPUs. Returns the seconds for each."""

    async def ask(text: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", text, env={**os.environ, "TORCH_EXTENSIONS_DIR": folder}
            )
            return "done" if await process.wait() == 0 else "failed"

    print("load_inline with a process for each")
    text = (MODEL_NEW if device == "cuda" else ON_A_CPU) + PEERS_CHECK.replace("DEVICE", device)
    return await each_takes(ask, text, budget.cpus(), seconds)


async def cheats() -> None:
    """Judge each cheat in CUDA."""
    async with Judge(SCALE, device="cuda") as judge:
        files = sorted((HERE / "cheats").glob("*.cu"))
        found = await asyncio.gather(
            *(judge(path.read_text(encoding="utf-8"), path.name) for path in files)
        )
    for verdict in found:
        print(f"{verdict.verdict:<8} {verdict.candidate}: {verdict.message}")
    passed = sum(
        verdict.verdict in ("correct", "noisy")
        and "harmless" not in (HERE / "cheats" / verdict.candidate).read_text("utf-8")
        for verdict in found
    )
    print(f"{passed} of {len(found)} cheats in CUDA pass")
    assert passed == 0


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    alone = "alone" in sys.argv
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "relu.py")
        model.write_text(MODEL, "utf-8")
        kinds = [("a C op", SCALE, C)]
        if device == "cuda":
            if not alone:
                asyncio.run(cheats())
            kinds = [
                ("a CUDA kernel and its rule", SCALE, KERNEL),
                ("a CUDA op", SCALE, CUDA),
                ("a ModelNew", str(model), MODEL_NEW),
            ]
        ours = {
            what: asyncio.run(verdicts(what, task, text, device, seconds))
            for what, task, text in kinds
        }
    if alone:
        return
    theirs = asyncio.run(peer(device, seconds))
    common.show(
        "seconds of a verdict",
        [common.ratio(what, [each], [theirs]) for what, each in ours.items()],
        ("judge", "load_inline"),
    )


if __name__ == "__main__":
    main()

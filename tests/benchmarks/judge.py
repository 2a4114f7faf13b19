"""Verdicts a minute on C ops, against torch's load_inline with a process for each: python tests/benchmarks/judge.py [CANDIDATES [PEERS]]

The peer does less: it compiles, compares one call with allclose, and times one loop, in the candidate's own process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import common

from opjit.builder import budget
from opjit.judge import Judge, Verdict

ROOT = Path(__file__).parents[2]
C = """opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++) /* %d */
        ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i];
    return OPJIT_OK;
}
"""
PEER = """
import sys, tempfile, time, torch
from torch.utils.cpp_extension import load_inline
source = '''torch::Tensor scale(torch::Tensor x, double a) {
    auto out = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); i++) /* %d */
        out.data_ptr<float>()[i] = (float)a * x.data_ptr<float>()[i];
    return out;
}'''
with tempfile.TemporaryDirectory() as folder:
    scale = load_inline("scale", source, functions="scale", build_directory=folder).scale
    x = torch.rand(1 << 14)
    assert torch.allclose(scale(x, 2.5), 2.5 * x)
    started = time.perf_counter()
    for _ in range(100):
        scale(x, 2.5)
"""


async def judged(count: int) -> float:
    """Judge candidates, all of them new. Returns seconds, without those of the start."""
    async with Judge(str(ROOT / "tests/judge/scale"), device="cpu") as judge:
        stamp = time.time_ns() % 1_000_000_000
        started = time.perf_counter()
        verdicts: list[Verdict] = await asyncio.gather(*(judge('#include "opjit.h"\n' + C % (stamp + number), str(number))
                                                         for number in range(count)))
        seconds = time.perf_counter() - started
    assert {verdict.verdict for verdict in verdicts} <= {"correct", "noisy"}, [each for each in verdicts if each.verdict == "wrong"]
    print(f"{sum(verdict.verdict == 'noisy' for verdict in verdicts)} of {count} candidates have no time: the machine was busy")
    return seconds


def peers(count: int) -> float:
    """The same by processes, as many at once as there are CPUs."""
    started, running = time.perf_counter(), []
    for number in range(count):
        running.append(subprocess.Popen([sys.executable, "-c", PEER % number]))
        if len(running) >= budget.cpus():
            assert running.pop(0).wait() == 0
    assert all(each.wait() == 0 for each in running)
    return time.perf_counter() - started


def main() -> None:
    count, others = (int(text) for text in [*sys.argv[1:], *("60", "2")[len(sys.argv) - 1:]])
    ours = asyncio.run(judged(count)) / count
    theirs = peers(others) / others
    print(f"{60 / ours:.0f} verdicts a minute, load_inline with a process for each {60 / theirs:.1f}")
    common.show("seconds of a verdict", [common.ratio("a C op", [ours], [theirs])], ("judge", "load_inline"))


if __name__ == "__main__":
    main()

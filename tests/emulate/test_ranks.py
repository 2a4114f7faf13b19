"""Kernels across ranks, all in one process: six mistakes at their lines, a rank that does not come, and the bundled collectives."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulate.programs import HERE, Outcome, compiled, names_a_line
from tests.helpers import ROOT, command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOURCE = HERE / "ranks.cu"
SEEDS = (1, 2, 3)
MISTAKES = {
    1: "no release",
    2: "no acquire",
    3: "no barrier before the reads",
    4: "no barrier before the next call writes",
    5: "no __syncthreads before the signal",
    6: "elements of another block",
    7: "a wrong epoch",
}


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, int], Outcome]:
    return compiled(SOURCE, tmp_path_factory.mktemp("ranks"))


def test_a_right_all_reduce_is_not_reported(call: Callable[[int, int, int], Outcome]) -> None:
    for seed in SEEDS:
        assert call(0, 1, seed) == (True, [])


@pytest.mark.parametrize("mistake", MISTAKES, ids=MISTAKES.get)
def test_a_mistake_between_ranks_is_found_at_its_line(
    mistake: int, call: Callable[[int, int, int], Outcome]
) -> None:
    for seed in SEEDS:
        outcome = call(mistake, 1, seed)
        assert names_a_line(outcome, SOURCE, mistake), outcome
        assert re.search(r"race on `buffer \d`, byte \d+: rank \d block ", outcome.findings[0])


def test_a_rank_that_does_not_come_is_a_named_deadlock(
    call: Callable[[int, int, int], Outcome],
) -> None:
    outcome = call(0, 2, 1)
    assert "none of rank 2, which runs no kernel" in outcome.findings[0], outcome


@pytest.mark.parametrize(
    ("op", "ranks"),
    [
        ("all_reduce_ranks", 2),
        ("all_reduce_ranks", 8),
        ("exchange_ranks", 4),
        ("all_reduce_rms_norm", 4),
    ],
)
def test_a_bundled_collective_is_right_and_has_no_race(op: str, ranks: int, no_gpu: None) -> None:
    done = command("test", ROOT / "kernels_c" / op, "--ranks", str(ranks), "--emulate")
    lines = done.stdout.splitlines()
    passed = rf" on {ranks} ranks \(cuda, emulated on the CPU, no timing\): ok, \d\d calls checked"
    assert lines
    assert all(re.search(passed, line) for line in lines), done
    assert done.returncode == 0


OP = """\
import torch
import opjit

@opjit.op("emulated::total(Tensor x, str group) -> Tensor")
def total(x, group):
    return torch.empty_like(x)

@total.reference
def reference(x, group):
    return sum(opjit.distributed.gathered(x, group))

@total.samples
def samples(device):
    group = opjit.distributed.peers(device=device)
    for n in (100, 700):
        yield (torch.arange(float(n), device=device) + group.rank, group.name)
"""
KERNEL = """\
#include "opjit_peers.h"
static __global__ void total_kernel(const opjit_peers p, const float *x, float *out, int n)
{
    OPJIT_KERNEL_LOOP(i, n)
        ((float *)p.buffer[p.rank])[i] = x[i];
    OPJIT_BARRIER(&p);
    OPJIT_KERNEL_LOOP(i, n) {
        float sum = 0;
        for (int r = 0; r < p.world; r++)
            sum += ((const float *)p.buffer[r])[i]; /* here */
        out[i] = sum;
    }
    OPJIT_BARRIER(&p); /* last */
}

opjit_status total_cuda(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
{
    opjit_peers p;
    OPJIT_TRY(opjit_peers_of(&p, group, x->numel * 4));
    OPJIT_TRY(opjit_empty(out, 1, x->sizes, x->dtype, x));
    /* start */
    OPJIT_TRY(opjit_peers_launch(&p, (const void *)total_kernel, 4, 64, 0, stream));
    total_kernel<<<4, 64, 0, stream>>>(p, (const float *)x->data, (float *)out->data, (int)x->numel);
    return OPJIT_LAUNCHED();
}
"""


def _tested(folder: Path, kernel: str) -> str:
    (folder / "op.py").write_text(OP)
    (folder / "total.cu").write_text(kernel)
    done = command("test", folder, "--ranks", "3", "--device", "cuda")
    assert done.returncode == int(kernel != KERNEL), done
    return done.stdout


def test_an_op_across_ranks_is_checked_without_a_gpu(tmp_path: Path, no_gpu: None) -> None:
    out = _tested(tmp_path, KERNEL)
    assert "emulated::total on 3 ranks (cuda, emulated on the CPU, no timing): ok" in out


def test_a_missing_barrier_at_the_end_is_found_in_the_next_call(
    tmp_path: Path, no_gpu: None
) -> None:
    out = _tested(tmp_path, KERNEL.replace("OPJIT_BARRIER(&p); /* last */", ""))
    assert re.search(
        r"total.cu:\d+: race on `the buffer of rank \d`, byte \d+: rank \d block \d thread \d+ (reads|writes), "
        r"rank \d block \d thread \d+ (reads|writes) in line \d+; nothing orders the two ranks",
        out,
    ), out


def test_a_rank_that_does_not_come_is_named_after_the_time_limit(
    tmp_path: Path, no_gpu: None
) -> None:
    absent = "if (p.rank == 1) return OPJIT_OK;"
    out = _tested(tmp_path, KERNEL.replace("/* start */", absent))
    assert "group rank 0 of 3 in emulated::total: rank 1 did not come in time" in out

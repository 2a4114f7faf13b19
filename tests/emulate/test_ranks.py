"""Kernels across ranks, all in one process: six mistakes at their lines, a rank that does not come, and the bundled collectives."""

import math
import re
import shutil
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


GATHERING = ROOT / "examples" / "17_across_gpus" / "gather_multiply"


def test_a_gather_within_a_product_has_no_race(no_gpu: None) -> None:
    done = command("test", GATHERING, "--ranks", "2", "--emulate")
    assert re.search(r": ok, 9 calls checked for races and bounds, and 3 larger", done.stdout), done


def test_rows_that_are_signaled_too_early_are_found(tmp_path: Path, no_gpu: None) -> None:
    folder = tmp_path / "17_across_gpus" / "gather_multiply"
    shutil.copytree(GATHERING, folder)
    shutil.copytree(ROOT / "examples" / "19_matrix_kernel", tmp_path / "19_matrix_kernel")
    source = folder / "gather_multiply.cu"
    barrier = "opjit_named_barrier(COPY_BARRIER, COPYING);"
    source.write_text(source.read_text().replace(barrier, ""))
    out = command("test", folder, "--ranks", "2", "--emulate").stdout
    assert re.search(r"gather_multiply.cu:\d+: race on `the buffer of rank \d`", out), out


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


IS_RIGHT = "emulated::total on 3 ranks (cuda, emulated on the CPU, no timing): ok"


def _tested(folder: Path, kernel: str, op: str = OP) -> str:
    (folder / "op.py").write_text(op)
    (folder / "total.cu").write_text(kernel)
    done = command("test", folder, "--ranks", "3", "--device", "cuda")
    assert done.returncode == int(IS_RIGHT not in done.stdout), done
    return done.stdout


def test_an_op_across_ranks_is_checked_without_a_gpu(tmp_path: Path, no_gpu: None) -> None:
    assert IS_RIGHT in _tested(tmp_path, KERNEL)


# Every thread of the block moves elements, whatever the shape of the block.
SHAPED = KERNEL.replace(
    "OPJIT_KERNEL_LOOP(i, n)",
    "for (int i = blockIdx.x * opjit_threads() + opjit_thread(); i < n; i += gridDim.x * opjit_threads())",
).replace("<<<4, 64, 0, stream>>>", "<<<4, SHAPE, 0, stream>>>")


@pytest.mark.parametrize("shape", ["1", "2", "dim3(1, 2)", "dim3(2, 16)", "dim3(1, 1, 3)"])
def test_a_barrier_reaches_all_ranks_from_a_block_of_any_shape(
    shape: str, tmp_path: Path, no_gpu: None
) -> None:
    threads = math.prod(map(int, re.findall(r"\d+", shape.removeprefix("dim3"))))
    kernel = SHAPED.replace("SHAPE", shape).replace("4, 64, 0", f"4, {threads}, 0")
    assert IS_RIGHT in _tested(tmp_path, kernel)


# Words take the elements of a small tensor, and tiles those of a large one. A block has two threads, in y.
COLLECTIVE = """\
#include "opjit_collective.h"
static __global__ void words_kernel(const opjit_peers p, const float *x, float *out, int n)
{
    bool came = true;
    const uint32_t count = opjit_begin_words(&p);
    for (int i = opjit_thread(); i < n; i += opjit_threads())
        for (int r = 0; r < p.world; r++) {
            opjit_word word = {{__float_as_uint(x[i]), 0, 0}};
            opjit_push(&p, r, count, i, word);
        }
    for (int i = opjit_thread(); i < n; i += opjit_threads()) {
        float sum = 0;
        for (int r = 0; r < p.world; r++) {
            opjit_word word;
            came = came && opjit_pull(&p, r, count, i, &word);
            sum += __uint_as_float(word.data[0]);
        }
        out[i] = sum;
    }
    (void)opjit_end_words(&p, count, came);
}

static __global__ void tiles_kernel(const opjit_peers p, const float *x, float *out, int n)
{
    const uint32_t count = opjit_begin_tiles(&p, OPJIT_RING_A);
    for (int r = 0; r < p.world; r++)
        for (int i = opjit_thread(); i < n; i += opjit_threads())
            ((float *)opjit_tile(&p, OPJIT_RING_A, r, p.rank, count))[i] = x[i];
    opjit_send_tiles(&p, OPJIT_RING_A, count);
    if (!opjit_await_tiles(&p, OPJIT_RING_A, count))
        return;
    for (int i = opjit_thread(); i < n; i += opjit_threads()) {
        float sum = 0;
        for (int r = 0; r < p.world; r++)
            sum += ((const float *)opjit_tile(&p, OPJIT_RING_A, p.rank, r, count))[i];
        out[i] = sum;
    }
    opjit_end_tiles(&p, OPJIT_RING_A, count + 1);
}

opjit_status total_cuda(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
{
    void (*const kernel)(opjit_peers, const float *, float *, int) = x->numel < 200 ? words_kernel : tiles_kernel;
    opjit_peers p;
    OPJIT_TRY(opjit_peers_of(&p, group, x->numel * 4));
    OPJIT_TRY(opjit_empty(out, 1, x->sizes, x->dtype, x));
    OPJIT_TRY(opjit_peers_launch(&p, (const void *)kernel, 1, 2, 0, stream));
    kernel<<<1, dim3(1, 2), 0, stream>>>(p, (const float *)x->data, (float *)out->data, (int)x->numel);
    return OPJIT_LAUNCHED();
}
"""


def test_words_and_tiles_reach_all_ranks_from_a_block_of_any_shape(
    tmp_path: Path, no_gpu: None
) -> None:
    assert IS_RIGHT in _tested(tmp_path, COLLECTIVE)


# Without a copy, because the check calls an op with copies of its samples.
IN_PLACE = """\
#include "all_reduce_ranks/all_reduce_ranks.cu"

opjit_status total_cuda(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
{
    opjit_peers p;
    opjit_ranks_data ranks;
    opjit_tensor shared = *x;
    OPJIT_TRY(opjit_peers_of(&p, group, 0));
    shared.data = p.group->tensors->memory[p.rank];
    OPJIT_CHECK(opjit_tensors_of(&p, &shared, &ranks) && ranks.of[p.rank] == shared.data, "not the group's tensor");
    OPJIT_TRY(opjit_empty(out, 1, x->sizes, x->dtype, x));
    OPJIT_CUDA_CHECK(cudaMemcpyAsync(shared.data, x->data, (size_t)x->numel * 4, cudaMemcpyDeviceToDevice, stream));
    job<float> j = {NULL, NULL, x->numel, opjit_parts(x->numel / 4, p.world), false, ranks};
    OPJIT_TRY(launch(&p, &j, in_place<float>, 2, 64, stream));
    OPJIT_CUDA_CHECK(cudaMemcpyAsync(out->data, shared.data, (size_t)x->numel * 4, cudaMemcpyDeviceToDevice, stream));
    return OPJIT_OK;
}
"""


def test_tensors_of_the_group_are_added_in_place_without_a_race(
    tmp_path: Path, no_gpu: None
) -> None:
    samples = OP.replace("    for n in", "    group.empty((1000,))\n    for n in")
    assert IS_RIGHT in _tested(tmp_path, IN_PLACE, samples)


@pytest.mark.parametrize(
    ("given", "launched", "error"),
    [
        ("4, 64", "4, 32", "with another grid or block than it gave opjit_peers_launch"),
        ("4, 64", "dim3(4, 2), 64", "with another grid or block than it gave opjit_peers_launch"),
        ("0, 64", "4, 64", "0 blocks of 64 threads"),
        ("300, 64", "300, 64", "300 blocks wait for"),
    ],
)
def test_a_launch_that_breaks_a_rule_is_an_error_on_all_ranks(
    given: str, launched: str, error: str, tmp_path: Path, no_gpu: None
) -> None:
    kernel = KERNEL.replace("4, 64, 0, stream)", f"{given}, 0, stream)")
    kernel = kernel.replace("((float *)p.buffer", "if (blockIdx.y == 0) ((float *)p.buffer", 1)
    out = _tested(tmp_path, kernel.replace("<<<4, 64, 0", f"<<<{launched}, 0"))
    assert error in out


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

"""`opjit test --device cuda` without a GPU: a kernel's mistakes at their lines, with the command that repeats the call."""

import re
from pathlib import Path

import pytest

from tests.helpers import command

OP = """\
import torch
import opjit

@opjit.op("emulated::rows(Tensor x) -> Tensor")
def rows(x):
    return x.new_empty(x.shape[0])

@rows.reference
def reference(x):
    return x.sum(1)

@rows.samples
def samples(device):
    for n, m in ((1, 1), (3, 100), (5, 256)):
        yield (torch.randint(-8, 8, (n, m), device=device).float(),)
"""
KERNEL = """\
#include "opjit_cuda.h"
static __global__ void rows(const float *x, float *out, int columns)
{
    __shared__ float part[256];
    const int t = threadIdx.x;
    part[t] = t < columns ? x[blockIdx.x * columns + t] : 0;
    __syncthreads();
    for (int step = 128; step > 0; step /= 2) {
        if (t < step)
            part[t] += part[t + step]; /* here */
        __syncthreads(); /* removed */
    }
    if (t == 0)
        out[blockIdx.x] = part[0];
}

opjit_status rows_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dim == 2 && x->contiguous && x->dtype == OPJIT_FLOAT32, "rows takes contiguous float32 matrices");
    OPJIT_CHECK(x->sizes[1] <= 256, "rows takes at most 256 columns");
    OPJIT_TRY(opjit_empty(out, 1, x->sizes, x->dtype, x));
    if (x->sizes[0] > 0)
        rows<<<(unsigned)x->sizes[0], 256, 0, stream>>>((const float *)x->data, (float *)out->data, (int)x->sizes[1]);
    return OPJIT_LAUNCHED();
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "op.py").write_text(OP)
    (tmp_path / "rows.cu").write_text(KERNEL)
    return tmp_path


def test_a_right_kernel_passes_and_each_line_says_emulated(folder: Path, no_gpu: None) -> None:
    done = command("test", folder, "--device", "cuda", "--only", "races", "--only", "results")
    lines = done.stdout.splitlines()
    assert (
        lines[0]
        == "emulated::rows on cuda, emulated on the CPU: results, races and bounds; no timing"
    )
    assert re.fullmatch(
        r"  ok       races              emulated: 9 schedules; 3 calls of up to 1,280 elements(?: \(.* s\))?",
        lines[1],
    ), done
    assert re.match(r"  ok       results            emulated: ", lines[2]), done
    assert lines[3] == "2 ok, CUDA emulated and not run on a GPU"
    assert done.returncode == 0


def test_a_barrier_that_no_sample_reaches_is_counted(folder: Path, no_gpu: None) -> None:
    shared = "    __shared__ float part[256];\n"
    unreached = f"    if (columns > 1000)\n        __syncthreads();\n{shared}"
    (folder / "rows.cu").write_text(KERNEL.replace(shared, unreached))
    done = command("test", folder, "--device", "cuda", "--only", "races")
    shown = r"emulated: 9 schedules, 1 of 3 barriers and atomics not reached \(rows.cu:5\); 3 calls"
    assert re.search(shown, done.stdout), done


def test_a_race_is_named_by_line_block_and_thread(folder: Path, no_gpu: None) -> None:
    (folder / "rows.cu").write_text(KERNEL.replace("__syncthreads(); /* removed */", ""))
    done = command("test", folder, "--device", "cuda", "--only", "races")
    found = re.search(
        r"^  failed   races +emulated: .*rows.cu:10: race on shared memory `part`, byte \d+: block \d thread \d+ "
        r"(?:reads|writes), block \d thread \d+ (?:reads|writes) in line 10; "
        r"if threads update one place, use atomicAdd\(\) or another atomic; "
        r"otherwise a barrier is missing between the reads and the writes",
        done.stdout,
        re.MULTILINE,
    )
    assert found, done.stdout
    repeated = re.search(
        r"^ +opjit (test .* --only races --sample (\d) --device cuda --emulate)$",
        done.stdout,
        re.MULTILINE,
    )
    assert repeated, done.stdout
    assert done.returncode == 1
    again = command(*repeated[1].split())
    assert found[0].split("byte")[0] in again.stdout


def test_what_is_not_emulated_is_said_at_its_line(folder: Path, no_gpu: None) -> None:
    (folder / "rows.cu").write_text(
        KERNEL.replace('"opjit_cuda.h"', '"opjit_cuda.h"\n#include <mma.h>')
    )
    done = command("test", folder, "--device", "cuda", "--only", "races")
    assert re.search(r"  skipped  build .*rows.cu:2.*tensor cores are not emulated", done.stdout), (
        done.stdout
    )
    assert done.returncode == 1  # nothing was checked


def test_the_mistakes_that_a_build_for_a_gpu_warns_of_are_shown_before_the_table(
    folder: Path, no_gpu: None
) -> None:
    text = KERNEL.replace("256, 0, stream>>>", "256>>>")
    text = text.replace("return OPJIT_L", "if (0) ((float *)out->data)[0] = 1;\n    return OPJIT_L")
    (folder / "rows.cu").write_text(text)
    for words in ([], ["--ranks", "2"]):
        done = command("test", folder, "--device", "cuda", "--only", "results", *words)
        shown = done.stdout + done.stderr
        assert "rows.cu:23: warning: the launch lacks a stream" in shown, done
        assert "rows.cu:24: warning: `out->data` is memory of the GPU" in shown, done

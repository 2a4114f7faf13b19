"""Findings name the author's line instead of a header of opjit, the helper's rule, and a remedy that fits."""

from pathlib import Path

import pytest

from tests.helpers import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OP = """\
import torch
import opjit

@opjit.op("blame::row(Tensor x) -> Tensor")
def row(x):
    return torch.empty_like(x)

@row.reference
def reference(x):
    return x.sum().expand_as(x).contiguous()

@row.samples
def samples(device):
    yield (torch.arange(128.0, device=device),)
"""
KERNEL = """\
#include "opjit_reduce.h"
static __global__ void row_kernel(const float *x, float *out, int n)
{
    const int i = threadIdx.x;
    MISTAKE
}

opjit_status row_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    row_kernel<<<1, 128, 0, stream>>>((const float *)x->data, (float *)out->data, (int)x->numel);
    return OPJIT_LAUNCHED();
}
"""
LINE = 5
RULE = (
    "all threads of a block must call opjit_block_reduce, and their number must be a multiple of 32"
)


def _found(folder: Path, mistake: str, threads: int = 128) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "op.py").write_text(OP)
    kernel = KERNEL.replace("MISTAKE", mistake).replace("1, 128", f"1, {threads}")
    (folder / "row.cu").write_text(kernel)
    done = command("test", folder, "--device", "cuda", "--only", "races")
    assert done.returncode == 1, done
    return done.stdout


@pytest.mark.parametrize(
    ("mistake", "threads", "said"),
    [
        ("out[i] = opjit_load(x + i + 1);", 128, "reads 4 bytes out of bounds: in no tensor"),
        ("if (i < 50) return; out[i] = opjit_block_reduce(x[i], opjit_add());", 128, RULE),
        ("if (i < 50) out[i] = opjit_block_reduce(x[i], opjit_add());", 128, RULE),
        ("out[i] = opjit_block_reduce(x[i], opjit_add());", 100, RULE),
        ("out[0] += x[i];", 128, "use atomicAdd()"),
        ("out[0] = x[i];", 128, "several threads write one place: use atomicAdd()"),
    ],
)
def test_a_finding_names_the_authors_line_and_a_remedy(
    mistake: str, threads: int, said: str, tmp_path: Path, no_gpu: None
) -> None:
    text = _found(tmp_path / "op", mistake, threads)
    assert f"row.cu:{LINE}: " in text
    assert said in text


def test_no_shell_reads_the_path_of_the_cache(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "it's $(touch ran)"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("OPJIT_CACHE", str(cache))
    assert f"row.cu:{LINE}: " in _found(tmp_path / "op", "out[i] = x[i + 1];")

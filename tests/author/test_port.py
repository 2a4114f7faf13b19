"""opjit port: the edits that code for old versions of torch needs, at their lines."""

import json
from pathlib import Path

import pytest

from opjit.author.port import find_edits
from tests.helpers import command

OLD = """\
#include <THC/THC.h>
#include <caffe/util/device_alternate.hpp>
// AT_CHECK in a comment
extern THCState *state;
void launch(at::Tensor x)
{
    AT_CHECK(x.type().is_cuda(), "AT_CHECK in a text");
    AT_DISPATCH_FLOATING_TYPES(x.type(), "launch", [&] {
        kernel<<<1, 32, 0, THCState_getCurrentStream(state)>>>(x.data<scalar_t>());
    });
    THCudaCheck(cudaGetLastError());
}
__global__ void kernel(float *x)
{
    x[0] += __shfl_down(x[0], 1);
}
"""
EDITS = [
    (1, "#include <THC/THC.h>", "#include <ATen/cuda/CUDAContext.h>"),
    (2, "#include <caffe/util/device_alternate.hpp>", '#include "opjit_caffe.h"'),
    (4, "extern THCState *state;", ""),
    (7, "AT_CHECK", "TORCH_CHECK"),
    (7, ".type().is_cuda()", ".is_cuda()"),
    (8, ".type()", ".scalar_type()"),
    (9, "THCState_getCurrentStream(state)", "at::cuda::getCurrentCUDAStream()"),
    (9, ".data<scalar_t>()", ".data_ptr<scalar_t>()"),
    (11, "THCudaCheck", "C10_CUDA_CHECK"),
    (15, "__shfl_down(", "__shfl_down_sync(0xffffffff,"),
]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "old.cu").write_text(OLD)
    return tmp_path / "old.cu"


def test_each_edit_is_at_its_line_and_none_is_in_a_comment_or_a_text(old: Path) -> None:
    edits = find_edits(old)
    assert [(each.line, each.found, each.replacement) for each in edits] == EDITS


def test_the_command_prints_a_line_for_each_edit(old: Path) -> None:
    lines = command("port", old).stdout.splitlines()
    assert lines[3] == f"{old}:7: AT_CHECK -> TORCH_CHECK (AT_CHECK was removed)"
    assert len(json.loads(command("port", old, "--json").stdout)) == len(EDITS)


def test_code_for_torch_of_today_needs_no_edit(tmp_path: Path) -> None:
    (tmp_path / "new.cpp").write_text(
        "at::Tensor f(at::Tensor x) { TORCH_CHECK(x.is_cuda()); return x; }\n"
    )
    assert find_edits(tmp_path / "new.cpp") == []

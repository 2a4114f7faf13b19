"""Mistakes in CUDA code that compile are warned of at the author's line, and code without them is not."""

import re
from pathlib import Path

import pytest

from opjit.builder import cuda_mistakes
from tests.helpers import ROOT

KERNEL = """\
#include "opjit_cuda.h"

static __global__ void scale_kernel({parameters})
{{
    OPJIT_KERNEL_LOOP(i, n)
        {body}
}}

opjit_status scale_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    if (x->numel == 0)
        return OPJIT_OK;
    scale_kernel<<<opjit_blocks(x->numel, 256), {launch}>>>((const float *)x->data, (float *)out->data, x->numel);
    {after}
}}
"""
RIGHT = {
    "parameters": "const float *x, float *y, int64_t n",
    "body": "y[i] = x[i];",
    "launch": "256, 0, stream",
    "after": "return OPJIT_LAUNCHED();",
}


@pytest.mark.parametrize(
    ("wrong", "line", "told"),
    [
        ({"launch": "256"}, 14, "the launch names no stream"),
        ({"launch": "dim3(16, 16), 4 * sizeof(float)"}, 14, "the launch names no stream"),
        ({"launch": "256, 0, 0"}, 14, "the launch names no stream"),
        (
            {"parameters": "const opjit_tensor *x, float *y, int64_t n"},
            3,
            "a kernel cannot read opjit_tensor *",
        ),
        ({"after": "return OPJIT_OK;"}, 15, "return OPJIT_LAUNCHED()"),
        ({"after": "cudaDeviceSynchronize();\n    return OPJIT_LAUNCHED();"}, 15, "stops the host"),
        (
            {"body": "((float4 *)y)[i] = ((const float4 *)x)[i];"},
            6,
            r"float4 \* wants an address that is a multiple",
        ),
        ({"body": "y[i] = reinterpret_cast<const double2 *>(x)[i].x;"}, 6, r"double2 \* wants"),
    ],
)
def test_a_mistake_that_compiles_is_warned_of_at_its_line(
    wrong: dict[str, str], line: int, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "scale.cu"
    file.write_text(KERNEL.format(**RIGHT | wrong))
    found = cuda_mistakes.find(file)
    assert {each.line for each in found} == {line}, found
    assert all(re.search(told, each.text) for each in found), found


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"launch": "256, 4 * (1 + sizeof(float)), stream"},
        {"body": "if ((uintptr_t)y % 16 == 0) ((float4 *)y)[i] = ((const float4 *)x)[i];"},
        {
            "body": "{ float own[4] = {x[i]}; y[i] = ((float4 *)own)[0].x + (*(float4 *)&own[0]).y; }"
        },
        {"body": "y[i] = x[i] * n; // (float4 *)y, kernel<<<1, 1>>>(), cudaDeviceSynchronize()"},
        {"after": "OPJIT_TRY(OPJIT_LAUNCHED());\n    return OPJIT_OK;"},
        {"after": "OPJIT_CUDA_CHECK(cudaStreamSynchronize(stream));\n    return OPJIT_OK;"},
        {"after": 'return cudaGetLastError() ? opjit_error_new(0, 0, "why") : OPJIT_OK;'},
    ],
)
def test_right_code_is_not_warned_of(right: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "scale.cu"
    file.write_text(KERNEL.format(**RIGHT | right))
    assert cuda_mistakes.find(file) == []


def test_no_op_of_this_repository_has_them() -> None:
    folders = [ROOT / "kernels_c", ROOT / "examples", ROOT / "templates", ROOT / "tests" / "ops"]
    found = [
        each
        for folder in folders
        for file in folder.rglob("*")
        if re.search(r"\.cuh?(\.in)?$", file.name)
        for each in cuda_mistakes.find(file)
    ]
    assert found == []


def test_text_that_is_no_code_has_no_warnings(tmp_path: Path) -> None:
    file = tmp_path / "odd.cu"
    file.write_text("}{ <<<")
    assert cuda_mistakes.find(file) == []
    assert cuda_mistakes.find(tmp_path / "missing.cu") == []

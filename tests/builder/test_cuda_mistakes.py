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
LAUNCHED = "\n    return OPJIT_LAUNCHED();"
FLAT = "static __global__ void flat(const float *x, float *y, int64_t n) {{ {} }}"
RIGHT = {
    "parameters": "const float *x, float *y, int64_t n",
    "body": "y[i] = x[i];",
    "launch": "256, 0, stream",
    "after": "return OPJIT_LAUNCHED();",
}


@pytest.mark.parametrize(
    ("wrong", "line", "told"),
    [
        ({"launch": "256"}, 14, "the launch lacks a stream"),
        ({"launch": "dim3(16, 16), 4 * sizeof(float)"}, 14, "the launch lacks a stream"),
        ({"launch": "256, 0, 0"}, 14, "the launch lacks a stream"),
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
        ({"launch": "2048, 0, stream"}, 14, "at most 1024 threads, so this launch of 2048 fails"),
        ({"launch": "dim3(64, 32), 0, stream"}, 14, "this launch of 2048 fails"),
        ({"after": f"float *p; cudaMalloc(&p, 4);{LAUNCHED}"}, 15, "use OPJIT_SCRATCH"),
        (
            {"after": f"cudaMemcpy(out->data, x->data, 4, cudaMemcpyDefault);{LAUNCHED}"},
            15,
            "cudaMemcpy stops the host.*cudaMemcpyAsync",
        ),
        ({"after": f"cudaMemset(out->data, 0, 4);{LAUNCHED}"}, 15, "cudaMemsetAsync"),
        (
            {"after": f"((float *)out->data)[0] = 1;{LAUNCHED}"},
            15,
            "`out->data` is memory of the GPU",
        ),
        ({"after": f"float a = ((const float *)x->data)[0];{LAUNCHED}"}, 15, "`x->data` is memory"),
        ({"after": f"float a = *(const float *)x->data;{LAUNCHED}"}, 15, "`x->data` is memory"),
        ({"after": f"float a = reinterpret_cast<float *>(x->data)[0];{LAUNCHED}"}, 15, "`x->data`"),
        ({"after": f"memcpy(&n, x->data, 4);{LAUNCHED}"}, 15, "`x->data` is memory of the GPU"),
    ],
)
def test_a_mistake_that_compiles_is_warned_of_at_its_line(
    wrong: dict[str, str], line: int, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "scale.cu"
    file.write_text(KERNEL.format(**RIGHT | wrong))
    found = cuda_mistakes.find_mistakes(file)
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
        {"launch": "dim3(32, 32), 0, stream"},
        {"launch": "1024, 2048, stream"},
        {"after": f"cudaMemcpyAsync(out->data, x->data, 4, cudaMemcpyDefault, stream);{LAUNCHED}"},
        {"after": f"const float *at = &((const float *)x->data)[1];{LAUNCHED}"},
        {"after": f"const float *at = (const float *)x->data + 1;{LAUNCHED}"},
        {"after": f"const opjit_ints *s; memcpy(&n, s->data, 4);{LAUNCHED}"},
        {"after": 'return cudaGetLastError() ? opjit_error_new(0, 0, "why") : OPJIT_OK;'},
    ],
)
def test_right_code_is_not_warned_of(right: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "scale.cu"
    file.write_text(KERNEL.format(**RIGHT | right))
    assert cuda_mistakes.find_mistakes(file) == []


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i];", True),
        ("int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = x[i];", False),
        ("int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return; y[i] = x[i];", False),
        ("int i = min(blockIdx.x * blockDim.x + threadIdx.x, n - 1); y[i] = x[i];", False),
        ("int i = blockIdx.x * blockDim.x + threadIdx.x; INSIDE(i, n); y[i] = x[i];", False),
        ("y[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];", False),  # a block for each row
    ],
)
def test_a_flat_index_needs_a_bound(body: str, warned: bool, tmp_path: Path) -> None:
    file = tmp_path / "flat.cu"
    file.write_text(FLAT.format(body))
    found = cuda_mistakes.find_mistakes(file)
    assert [each.line for each in found] == [1] * warned, found
    assert all("nothing compares the index with a size" in each.text for each in found)


def test_no_op_of_this_repository_has_them() -> None:
    folders = [ROOT / "kernels_c", ROOT / "examples", ROOT / "templates", ROOT / "tests" / "ops"]
    found = [
        each
        for folder in folders
        for file in folder.rglob("*")
        if re.search(r"\.cuh?(\.in)?$", file.name)
        for each in cuda_mistakes.find_mistakes(file)
    ]
    assert found == []


def test_text_that_is_no_code_has_no_warnings(tmp_path: Path) -> None:
    file = tmp_path / "odd.cu"
    file.write_text("}{ <<<")
    assert cuda_mistakes.find_mistakes(file) == []
    assert cuda_mistakes.find_mistakes(tmp_path / "missing.cu") == []

"""opjit_caffe.h: kernels in Caffe's style compile as they stand, and a failed check is an error in Python."""

from pathlib import Path

import pytest
import torch

import opjit
from opjit.builder import diagnosis
from opjit.catalog import registry
from opjit.errors import CompileError
from tests.helpers import ROOT

FOLDER = ROOT / "examples" / "06_from_caffe" / "round"
FAILING = """
#include "opjit_caffe.h"
__global__ void nothing(const int n) { CUDA_KERNEL_LOOP(i, n) {} }
void launch(int threads, cudaStream_t stream)
{
    nothing<<<CAFFE_GET_BLOCKS(1), threads, 0, stream>>>(1);
    CUDA_POST_KERNEL_CHECK; // line 7
    CUDA_CHECK(cudaStreamQuery(stream) == cudaErrorNotReady ? cudaSuccess : cudaGetLastError());
}
opjit_status failing_cuda(const opjit_tensor *x, int64_t threads, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    OPJIT_CUDA_CHECK(cudaMemsetAsync(out->data, 0, sizeof(float) * out->numel, stream));
    launch((int)threads, stream);
    return OPJIT_LAUNCHED();
}
"""


@pytest.mark.nvcc
def test_the_documents_kernel_compiles_as_it_stands(tmp_path: Path) -> None:
    [op] = registry.add_path(FOLDER)
    assert opjit.build_library(op.qualified, tmp_path, arch="sm_90").is_file()


OWN = """
#define CUDA_KERNEL_LOOP(i, n) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += blockDim.x * gridDim.x)
#define CUDA_CHECK(condition) do { cudaError_t error = condition; (void)error; } while (0)
#define CUDA_POST_KERNEL_CHECK CUDA_CHECK(cudaPeekAtLastError())
const int CAFFE_CUDA_NUM_THREADS = 512;
inline int CAFFE_GET_BLOCKS(const int N) { return (N + CAFFE_CUDA_NUM_THREADS - 1) / CAFFE_CUDA_NUM_THREADS; }
"""


@pytest.mark.nvcc
def test_a_header_of_caffes_own_may_come_first_and_else_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "own.h").write_text(OWN)
    schema = "failing(Tensor x, int threads) -> Tensor"
    late = FAILING.replace("__global__", '#include "own.h"\n__global__', 1)
    first = opjit.inline(
        schema, cuda=f'#include "own.h"{FAILING}', like="x", extra_include_paths=[tmp_path]
    )
    assert opjit.build_library(first.qualified, tmp_path, arch="sm_90").is_file()
    second = opjit.inline(schema, cuda=late, like="x", extra_include_paths=[tmp_path])
    with pytest.raises(
        CompileError,
        match=r"own\.h\S+ error: .*; Caffe's macros are in opjit_caffe\.h: include it, after any other",
    ):
        opjit.build_library(second.qualified, tmp_path, arch="sm_90")


@pytest.mark.nvcc
@pytest.mark.parametrize("order", ["first", "second"])
def test_the_header_of_caffe_may_come_first_or_second(tmp_path: Path, order: str) -> None:
    header = tmp_path / "caffe" / "util" / "device_alternate.hpp"
    header.parent.mkdir(parents=True)
    guard = "CAFFE_UTIL_DEVICE_ALTERNATE_H_"
    header.write_text(f"#ifndef {guard}\n#define {guard}\n{OWN}\n#endif\n")
    line = '#include "caffe/util/device_alternate.hpp"\n'
    code = (
        f"{line}{FAILING}"
        if order == "first"
        else FAILING.replace("__global__", f"{line}__global__", 1)
    )
    op = opjit.inline(
        "failing(Tensor x, int threads) -> Tensor",
        cuda=code,
        like="x",
        extra_include_paths=[tmp_path],
    )
    assert opjit.build_library(op.qualified, tmp_path, arch="sm_90").is_file()


def test_the_documents_kernel_computes(cuda_device: str) -> None:
    [op] = registry.add_path(FOLDER)
    for size in (0, 1, 511, 513, 100_000):
        x = torch.linspace(-1, 2, size, device=cuda_device, requires_grad=True)
        y = op(x)
        torch.testing.assert_close(y, (x > 0.5).float(), rtol=0, atol=0)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.eq(1).all()


def test_a_failed_check_of_a_function_that_returns_nothing_is_an_error_at_its_line(
    cuda_device: str,
) -> None:
    op = opjit.inline("failing(Tensor x, int threads) -> Tensor", cuda=FAILING, like="x")
    x = torch.ones(3, device=cuda_device)
    on_gpu = r"invalid (configuration )?argument .*kernel launch \[.*(failing\.cu:7|test_caffe\.py:\d+)\]"
    emulated = "failing.cu:6: invalid configuration of nothing"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{on_gpu}|{emulated}"):
            op(x, 5000)
        assert op(x, 512).shape == (3,), "the error ended with its call"


@pytest.mark.parametrize(
    "complaint",
    [
        'k.cu(4): error: identifier "i" is undefined\n  CUDA_KERNEL_LOOP(i, n) {\n'
        'k.cu(4): error: identifier "CUDA_KERNEL_LOOP" is undefined',
        "k.cu:9:3: error: 'CUDA_POST_KERNEL_CHECK' was not declared in this scope",
        "k.cu:1:10: fatal error: caffe_cuda_macro.h: No such file or directory",
    ],
)
def test_a_missing_header_is_named(tmp_path: Path, complaint: str) -> None:
    error = diagnosis.diagnose(
        complaint, "optest::k", "cuda sm_90", tmp_path, ("k.cu", "opjit_status k_cuda(void)")
    )
    assert (
        str(error)
        .splitlines()[0]
        .endswith(
            "; Caffe's macros are in opjit_caffe.h: include it, after any other header that has them"
        )
    )

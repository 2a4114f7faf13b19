"""The fixtures `device` and `cuda_device`: CUDA kernels serve CPU tensors in a test, and C kernels do before and after it."""

import pytest
import torch

from opjit.catalog import registry
from tests.helpers import MakeOp, emulated, is_emulated

KERNEL = """
static __global__ void say_kernel(const float *x, float *out, int n) { out[threadIdx.x] = x[(threadIdx.x + 1) % n]; }
opjit_status say_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    say_kernel<<<1, (unsigned)x->numel, 0, stream>>>((const float *)x->data, (float *)out->data, (int)x->numel + 1);
    return OPJIT_LAUNCHED();
}
"""


def test_the_kernel_of_a_test_is_cuda_s_and_later_the_cpu_s(no_gpu: None) -> None:
    op = registry.find("tensor_negate")
    x = torch.ones(3)
    before = op(x)
    assert "cpu" in op.loaded
    with emulated(checked=True):
        assert is_emulated()
        assert torch.equal(op(x), before)
        assert set(op.loaded) == {"cuda"}
    assert not is_emulated()
    assert torch.equal(op(x), before)
    assert set(op.loaded) == {"cpu"}


def test_accesses_are_checked(make_op: MakeOp, no_gpu: None) -> None:
    op = make_op("say(Tensor x) -> Tensor", cuda=KERNEL, fake=torch.empty_like)
    out_of_bounds = r"say\.cu:3: .* reads 4 bytes out of bounds"
    with emulated(checked=True), pytest.raises(RuntimeError, match=out_of_bounds):
        op(torch.ones(8))

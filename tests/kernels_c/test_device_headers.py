"""opjit_random.h, opjit_reduce.h and opjit_pack.h: what every author of a CUDA kernel writes by hand, written once."""

from pathlib import Path

import pytest
import torch

from opjit import request
from opjit.wanted import target_of
from tests.helpers import MakeOp
from tests.kernels_c.test_dtypes import QUANTIZE_CUDA, TURN_CUDA
from tests.kernels_c.test_header import TWICE_CUDA

SCHEMA = "drawn(Tensor like, int seed, int n) -> (Tensor, Tensor)"
DRAWN = """
#include "opjit_random.h"
opjit_status drawn_cpu(const opjit_tensor *like, int64_t seed, int64_t n, opjit_tensor *words, opjit_tensor *normals)
{
    OPJIT_TRY(opjit_empty(words, OPJIT_SIZES(n, 4), OPJIT_INT64, like));
    OPJIT_TRY(opjit_empty(normals, OPJIT_SIZES(n, 2), OPJIT_FLOAT32, like));
    for (int64_t i = 0; i < n; i++) {
        const opjit_random drawn = opjit_philox((uint64_t)seed, (uint64_t)i, 0);
        for (int k = 0; k < 4; k++)
            ((int64_t *)words->data)[4 * i + k] = drawn.word[k];
        opjit_normal(drawn.word[0], drawn.word[1], (float *)normals->data + 2 * i);
    }
    return OPJIT_OK;
}
"""
DRAWN_CUDA = """
#include "opjit_random.h"
static __global__ void draw(uint64_t seed, int64_t n, int64_t *words, float *normals)
{
    OPJIT_KERNEL_LOOP(i, n) {
        const opjit_random drawn = opjit_philox(seed, (uint64_t)i, 0);
        for (int k = 0; k < 4; k++)
            words[4 * i + k] = drawn.word[k];
        opjit_normal(drawn.word[0], drawn.word[1], normals + 2 * i);
    }
}
opjit_status drawn_cuda(const opjit_tensor *like, int64_t seed, int64_t n, opjit_tensor *words, opjit_tensor *normals, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(words, OPJIT_SIZES(n, 4), OPJIT_INT64, like));
    OPJIT_TRY(opjit_empty(normals, OPJIT_SIZES(n, 2), OPJIT_FLOAT32, like));
    draw<<<opjit_blocks(n, 256), 256, 0, stream>>>((uint64_t)seed, n, (int64_t *)words->data, (float *)normals->data);
    return OPJIT_LAUNCHED();
}
"""
REDUCED = """
#include "opjit_reduce.h"
#include "opjit_pack.h"
static __global__ void reduce_rows(const float *x, float *out, int64_t columns, bool packed)
{
    typedef opjit_pack<float> pack;
    const float *row = x + blockIdx.x * columns;
    const unsigned thread = threadIdx.x + blockDim.x * threadIdx.y, threads = blockDim.x * blockDim.y;
    const int64_t packs = packed ? columns / pack::width : 0;
    float sum = 0, largest = row[0], smallest = row[0];
    for (int64_t i = thread; i < packs; i += threads) {
        const pack four = ((const pack *)row)[i];
        for (int k = 0; k < pack::width; k++)
            sum += four.at[k];
    }
    for (int64_t i = packs * pack::width + thread; i < columns; i += threads)
        sum += row[i];
    for (int64_t i = thread; i < columns; i += threads) {
        largest = opjit_maximum()(largest, row[i]);
        smallest = opjit_minimum()(smallest, row[i]);
    }
    sum = opjit_block_reduce(sum, opjit_add());
    largest = opjit_block_reduce(largest, opjit_maximum());
    smallest = opjit_block_reduce(smallest, opjit_minimum());
    if (thread == 0) {
        out[3 * blockIdx.x] = sum;
        out[3 * blockIdx.x + 1] = largest;
        out[3 * blockIdx.x + 2] = smallest;
    }
}
opjit_status reduced_cuda(const opjit_tensor *x, int64_t warps, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->contiguous && x->dtype == OPJIT_FLOAT32 && x->dim == 2, "expected a contiguous float32 matrix");
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(x->sizes[0], 3), x->dtype, x));
    const bool packed = opjit_is_aligned(x->data, OPJIT_PACK_BYTES) && x->sizes[1] % opjit_pack<float>::width == 0;
    reduce_rows<<<(unsigned)x->sizes[0], dim3(32, (unsigned)warps), 0, stream>>>((const float *)x->data, (float *)out->data, x->sizes[1],
                                                                                packed);
    return OPJIT_LAUNCHED();
}
"""


def _fake(like: torch.Tensor, seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return like.new_empty((n, 4), dtype=torch.int64), like.new_empty((n, 2), dtype=torch.float32)


def test_philox_gives_the_numbers_of_its_authors_tests(make_op: MakeOp) -> None:
    """Random123's known answers: counters and keys of zeros, of ones, and of the digits of pi."""
    op = make_op(
        "known(Tensor x) -> Tensor",
        """
        #include "opjit_random.h"
        opjit_status known_cpu(const opjit_tensor *x, opjit_tensor *out)
        {
            const opjit_random found[] = {opjit_philox(0, 0, 0), opjit_philox(UINT64_MAX, UINT64_MAX, UINT64_MAX),
                                          opjit_philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88)};
            OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(12), OPJIT_INT64, x));
            for (int i = 0; i < 12; i++)
                ((int64_t *)out->data)[i] = found[i / 4].word[i % 4];
            return OPJIT_OK;
        }
        """,
        fake=lambda x: x.new_empty(12, dtype=torch.int64),
    )
    assert [f"{number:08x}" for number in op(torch.ones(1)).tolist()] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
        "408f276d",
        "41c83b0e",
        "a20bc7c6",
        "6d5451fd",
        "d16cfe09",
        "94fdcceb",
        "5001e420",
        "24126ea1",
    ]


def test_normal_numbers_have_mean_0_and_variance_1(make_op: MakeOp) -> None:
    op = make_op(SCHEMA, DRAWN, fake=_fake)
    words, normals = op(torch.ones(1), 7, 100_000)
    assert normals.isfinite().all()
    assert abs(normals.mean()) < 0.01
    assert abs(normals.var() - 1) < 0.02
    assert abs(torch.corrcoef(normals.t())[0, 1]) < 0.01
    assert words.unique().numel() > 0.9999 * words.numel()


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ("twice(Tensor x) -> Tensor", TWICE_CUDA),
        pytest.param(SCHEMA, DRAWN_CUDA, marks=pytest.mark.slow),
        pytest.param("reduced(Tensor x, int warps) -> Tensor", REDUCED, marks=pytest.mark.slow),
        pytest.param("turn(Tensor z, float a) -> Tensor", TURN_CUDA, marks=pytest.mark.slow),
        pytest.param(
            "quantize(Tensor x, ScalarType dtype) -> Tensor", QUANTIZE_CUDA, marks=pytest.mark.slow
        ),
    ],
)
def test_a_kernel_of_opjit_s_headers_is_compiled_without_a_gpu(
    make_op: MakeOp, schema: str, code: str
) -> None:
    op = make_op(schema, cuda=code, fake=_fake)
    assert Path(request.entry(op, target_of("cuda", "sm_90")).library).is_file()


def test_the_same_numbers_are_drawn_on_a_gpu(make_op: MakeOp, cuda_device: str) -> None:
    on_cpu = make_op(SCHEMA, DRAWN, fake=_fake)
    on_cuda = make_op(SCHEMA, cuda=DRAWN_CUDA, fake=_fake)
    for one, other in zip(
        on_cpu(torch.ones(1), 2**62 + 5, 5000),
        on_cuda(torch.ones(1, device=cuda_device), 2**62 + 5, 5000),
        strict=True,
    ):
        torch.testing.assert_close(one, other.cpu())


@pytest.mark.parametrize("warps", [1, 3, 8, 32])
def test_a_block_s_sum_largest_and_smallest_value_are_torch_s(
    make_op: MakeOp, cuda_device: str, warps: int
) -> None:
    op = make_op(
        "reduced(Tensor x, int warps) -> Tensor",
        cuda=REDUCED,
        fake=lambda x, warps: x.new_empty((x.shape[0], 3)),
    )
    for columns in (1, 31, 64, 1000, 4096):
        # No pack of it is aligned.
        x = torch.randn(7 * columns + 1, device=cuda_device)[1:].reshape(7, columns)
        for each in (x, x.clone()):
            torch.testing.assert_close(
                op(each, warps),
                torch.stack((each.sum(1), each.amax(1), each.amin(1)), 1),
                rtol=1e-5,
                atol=1e-4,
            )
    x[3, columns // 2] = torch.nan
    assert op(x, warps)[3].isnan().all()

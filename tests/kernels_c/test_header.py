"""The lines of opjit.h that an author writes every day: contiguous copies, sizes, scratch, half precision, and where an error is."""

import pytest
import torch

from tests.helpers import MakeOp
from tests.tensors import FLOATING

TWICE = """
opjit_status twice_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    opjit_tensor copy;
    OPJIT_TRY(opjit_contiguous(&copy, x));
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(2, x->numel), x->dtype, x));
    OPJIT_DISPATCH_ALL_FLOATING(x->dtype, "twice", {
        const scalar_t *from = (const scalar_t *)copy.data;
        scalar_t *to = (scalar_t *)out->data;
        opmath_t *doubled;
        OPJIT_SCRATCH(doubled, copy.numel, x);
        for (int64_t i = 0; i < copy.numel; i++)
            doubled[i] = 2 * opjit_load(from + i);
        for (int64_t i = 0; i < 2 * copy.numel; i++)
            opjit_store(to + i, doubled[i % copy.numel]);
    })
    return OPJIT_OK;
}
"""
TWICE_CUDA = """
template <typename scalar_t, typename opmath_t>
static __global__ void twice(const scalar_t *from, const opmath_t *factor, scalar_t *to, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, 2 * n)
        opjit_store(to + i, *factor * opjit_load(from + i % n));
}

static __global__ void set(float *factor, double *wide) { *factor = 2; *wide = 2; }

opjit_status twice_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    opjit_tensor copy;
    float *factor;
    double *wide;
    OPJIT_TRY(opjit_contiguous(&copy, x));
    OPJIT_SCRATCH(factor, 1, x);
    OPJIT_SCRATCH(wide, 1, x);
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(2, x->numel), x->dtype, x));
    set<<<1, 1, 0, stream>>>(factor, wide);
    OPJIT_DISPATCH_ALL_FLOATING(x->dtype, "twice", {
        const opmath_t *two = sizeof(opmath_t) == 8 ? (const opmath_t *)wide : (const opmath_t *)factor;
        twice<<<opjit_blocks(2 * x->numel, 256), 256, 0, stream>>>((const scalar_t *)copy.data, two, (scalar_t *)out->data, x->numel);
    })
    return OPJIT_LAUNCHED();
}
"""


@pytest.mark.torch
def test_contiguous_copies_sizes_scratch_and_half_precision(make_op: MakeOp, device: str) -> None:
    op = make_op("twice(Tensor x) -> Tensor", TWICE, cuda=TWICE_CUDA)
    for dtype in FLOATING:
        x = torch.linspace(-3, 4, 60, dtype=dtype, device=device).reshape(3, 4, 5)
        for view in (
            x,
            x.permute(2, 0, 1),
            x[:, ::2, 1:],
            x[0, 0, 0].expand(7),
            x[:, :0],
            x[1, 1, 1],
            x.requires_grad_(),
        ):
            before = view._version
            got = op(view)
            torch.testing.assert_close(got, (2 * view).reshape(-1).expand(2, -1), rtol=0, atol=0)
            assert view._version == before
    with pytest.raises(RuntimeError, match="twice does not take int64"):
        op(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "OPJIT_TRY(opjit_empty(out, 99, NULL, x->dtype, x));",
            "an output has 0 to 64 dimensions, not 99",
        ),
        ("float *sums; OPJIT_SCRATCH(sums, -1, x);", "scratch of -4 bytes"),
        (
            "OPJIT_TRY(opjit_promote(OPJIT_FLOAT32, OPJIT_OTHER_DTYPE, &(opjit_dtype){OPJIT_BOOL}));",
            "dtype",
        ),
        ("OPJIT_TRY(helper(x));", "an output has 0 to 64 dimensions, not -1"),
        ('OPJIT_FAIL("no");', "no"),
    ],
)
def test_an_error_of_opjits_own_function_has_the_line_of_the_call(
    make_op: MakeOp, line: str, says: str
) -> None:
    op = make_op(
        "failing(Tensor x) -> Tensor",
        f"""
#include "opjit_elementwise.h"
static opjit_status helper(const opjit_tensor *x)
{{
    opjit_tensor made = *x;
    made.handle = NULL; OPJIT_TRY(opjit_empty(&made, -1, NULL, x->dtype, x)); /* line 7 */
    return OPJIT_OK;
}}
opjit_status failing_cpu(const opjit_tensor *x, opjit_tensor *out)
{{
    {line} // line 12
    return opjit_empty_like(out, x, x->dtype);
}}
""",
        fake=torch.empty_like,
    )
    with pytest.raises(
        RuntimeError, match=rf"{says}.* \[failing\.c:{7 if 'helper' in line else 12}\]$"
    ):
        op(torch.ones(3))


def test_a_contiguous_copy_is_no_result(make_op: MakeOp) -> None:
    op = make_op(
        "copied(Tensor x) -> Tensor",
        """
        opjit_status copied_cpu(const opjit_tensor *x, opjit_tensor *out) { return opjit_contiguous(out, x); }
        """,
    )
    for x in (torch.ones(3, 4), torch.ones(3, 4).t()):
        with pytest.raises(RuntimeError, match="did not make the output"):
            op(x)

"""Half precision, float8 and complex dtypes in kernels: converted, allocated, dispatched, in C and in CUDA C."""

import math

import pytest
import torch

from opjit import Op
from tests.helpers import MakeOp
from tests.tensors import COMPLEX, REAL

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RECODE = """
#include "opjit_convert.h"
opjit_status recode_cpu(const opjit_tensor *x, opjit_dtype dtype, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, dtype, x));
    opjit_convert(x->numel, x->data, x->dtype, x->dim ? x->strides[0] : 1, out->data, dtype);
    return OPJIT_OK;
}
"""
# A row divided by its largest magnitude, as float8, and the scale: what a matrix product in float8 takes.
QUANTIZE = """
#include "opjit.h"
opjit_status quantize_cpu(const opjit_tensor *x, opjit_dtype dtype, opjit_tensor *out, opjit_tensor *scale)
{
    const float limit = dtype == OPJIT_FLOAT8_E4M3FN ? 448 : 57344;
    OPJIT_CHECK(x->contiguous && x->dim == 2, "quantize takes rows");
    OPJIT_TRY(opjit_empty(out, 2, x->sizes, dtype, x));
    OPJIT_TRY(opjit_empty(scale, 1, x->sizes, OPJIT_FLOAT32, x));
    OPJIT_DISPATCH_ALL_FLOATING(x->dtype, "quantize", {
        const scalar_t *from = (const scalar_t *)x->data;
        float *scales = (float *)scale->data;
        OPJIT_DISPATCH_FLOAT8(dtype, "quantize", {
            for (int64_t row = 0; row < x->sizes[0]; row++, from += x->sizes[1]) {
                float largest = 0;
                for (int64_t i = 0; i < x->sizes[1]; i++) {
                    const float number = (float)opjit_load(from + i);
                    largest = largest > number ? largest : number;
                    largest = largest > -number ? largest : -number;
                }
                scales[row] = largest / limit;
                for (int64_t i = 0; i < x->sizes[1]; i++)
                    opjit_store((scalar_t *)out->data + row * x->sizes[1] + i, (float)opjit_load(from + i) / scales[row]);
            }
        })
    })
    return OPJIT_OK;
}
"""
QUANTIZE_CUDA = """
#include "opjit_cuda.h"
template <typename from_t, typename to_t>
static __global__ void quantize_kernel(const from_t *from, to_t *to, float scale, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        opjit_store(to + i, opjit_load(from + i) / scale);
}
opjit_status quantize_cuda(const opjit_tensor *x, opjit_dtype dtype, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, dtype, x));
    OPJIT_SWITCH(x->dtype, "quantize", OPJIT_CASES_HALF({
        const scalar_t *from = (const scalar_t *)x->data;
        OPJIT_DISPATCH_FLOAT8(dtype, "quantize", {
            quantize_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>(from, (scalar_t *)out->data, 2.0f, x->numel);
        })
    }))
    return OPJIT_LAUNCHED();
}
"""
TURN = """
    OPJIT_TRY(opjit_empty_like(out, z, z->dtype));
    OPJIT_DISPATCH_COMPLEX(z->dtype, "turn", {
        const scalar_t *from = (const scalar_t *)z->data;
        const scalar_t i = OPJIT_COMPLEX(real_t, 0, 1);
        LOOP
    })
"""
BODY = "1 / (from[k] * i - opjit_conj(from[k])) + from[k] / (2 + i) - 3 * opjit_real(from[k]) + (opjit_imag(from[k]) - from[k]) * a"
TURN_C = (
    """
#include "opjit_complex.h"
opjit_status turn_cpu(const opjit_tensor *z, double a, opjit_tensor *out)
{"""
    + TURN.replace(
        "LOOP", f"for (int64_t k = 0; k < z->numel; k++) ((scalar_t *)out->data)[k] = {BODY};"
    )
    + """
    return OPJIT_OK;
}
"""
)
TURN_CUDA = (
    f"""
#include "opjit_complex.h"
#include "opjit_cuda.h"
template <typename scalar_t>
static __global__ void turn_kernel(const scalar_t *from, scalar_t *to, scalar_t i, double a, int64_t n)
{{
    OPJIT_KERNEL_LOOP(k, n)
        to[k] = {BODY};
}}
opjit_status turn_cuda(const opjit_tensor *z, double a, opjit_tensor *out, cudaStream_t stream)
{{"""
    + TURN.replace(
        "LOOP", "turn_kernel<<<1, 64, 0, stream>>>(from, (scalar_t *)out->data, i, a, z->numel);"
    )
    + """
    return OPJIT_LAUNCHED();
}
"""
)


def turned(z: torch.Tensor, a: float) -> torch.Tensor:
    return 1 / (z * 1j - z.conj()) + z / (2 + 1j) - 3 * z.real + (z.imag - z) * a


def every(dtype: torch.dtype) -> torch.Tensor:
    """All numbers that a dtype has."""
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    return torch.arange(2 ** (8 * dtype.itemsize)).to(bits).view(dtype)


def hard(dtype: torch.dtype) -> torch.Tensor:
    """Every float16, every number of the dtype, the ties between these, their neighbors, and random bits."""
    exact = every(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    ties = (exact[1:].double() + exact[:-1].double()) / 2
    random = (
        torch.randint(-(2**31), 2**31, (1_000_000,), generator=torch.Generator().manual_seed(0))
        .to(torch.int32)
        .view(torch.float32)
    )
    limits = [
        448.0,
        464.0,
        480.0,
        57344.0,
        61440.0,
        65504.0,
        65519.996,
        65520.0,
        65536.0,
        3.3895314e38,
        3.3961776e38,
        1e-45,
        math.inf,
        math.nan,
    ]
    around = torch.cat([exact, ties.float(), torch.tensor(limits)])
    nearby = (torch.nextafter(around, torch.tensor(end)) for end in (-math.inf, math.inf))
    return torch.cat([every(torch.float16).float(), random, *nearby, around, -around])


@pytest.fixture
def recode(make_op: MakeOp) -> Op:
    return make_op(
        "recode(Tensor x, ScalarType dtype) -> Tensor",
        RECODE,
        fake=lambda x, dtype: x.new_empty(x.shape, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8])
def test_a_small_dtype_converts_as_in_torch(recode: Op, dtype: torch.dtype) -> None:
    numbers = every(dtype)
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    for got, expected in (
        (recode(numbers, torch.float32), numbers.float()),
        (recode(numbers[::3], torch.float64), numbers[::3].double()),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit()[~got.isnan()], expected.signbit()[~got.isnan()])
    values = hard(dtype)
    if (
        torch.__version__ < "2.13" and dtype == torch.float8_e4m3fn
    ):  # which made NaN of what is too large
        values = values[values.abs() <= 448]
    got = recode(values, dtype)
    expected = values.to(dtype)
    assert torch.equal(got.float().isnan(), values.isnan()), (
        "NaN stays NaN, and nothing becomes one"
    )
    assert torch.equal(got.view(bits)[~values.isnan()], expected.view(bits)[~values.isnan()])
    assert recode(torch.arange(-8, 9), dtype).float().tolist() == list(range(-8, 9))
    assert recode(torch.arange(-8.0, 9).to(dtype), torch.int16).tolist() == list(range(-8, 9))


@pytest.mark.parametrize("source", [*REAL, *FLOAT8])
def test_a_row_of_any_length_and_stride_converts_as_in_torch(
    recode: Op, source: torch.dtype
) -> None:
    """Blocks, the last few elements, gathered and repeated ones. Integers also wrap."""
    whole = not source.is_floating_point
    generator = torch.Generator().manual_seed(1)
    small = (torch.randint(0, 64, (2600,), generator=generator) / (1 if whole else 4)).to(source)
    large = torch.randint(-(2**62), 2**62, (2600,), generator=generator).to(source)
    for result in (*REAL, *FLOAT8):
        wraps = whole and not result.is_floating_point
        rounds = whole and source.is_signed and result.is_floating_point and result not in FLOAT8
        for x in (small, large) if wraps or rounds else (small,):
            for view in (x[:0], x[:1], x[:511], x[1:514], x[:1040:2], x[::5], x[:1].expand(700)):
                got = recode(view, result)
                expected = view.to(result)
                assert got.dtype == result
                if result.is_floating_point:
                    got = got.double()
                    expected = expected.double()
                assert torch.equal(got, expected), (result, view.shape, view.stride())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_an_op_makes_float8_tensors(make_op: MakeOp, dtype: torch.dtype) -> None:
    op = make_op(
        "quantize(Tensor x, ScalarType dtype) -> (Tensor, Tensor)",
        QUANTIZE,
        fake=lambda x, dtype: (
            x.new_empty(x.shape, dtype=dtype),
            x.new_empty(x.shape[0], dtype=torch.float32),
        ),
    )
    for source in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(source)
        made, scale = op(x, dtype)
        limit = torch.finfo(dtype).max
        torch.testing.assert_close(scale, x.float().abs().amax(1) / limit)
        assert torch.equal(
            made.view(torch.uint8), (x.float() / scale[:, None]).to(dtype).view(torch.uint8)
        )
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)(x, dtype)
        assert torch.equal(compiled[0].view(torch.uint8), made.view(torch.uint8))
    with pytest.raises(RuntimeError, match="quantize does not take float8_e5m2"):
        op(torch.ones(2, 2).to(torch.float8_e5m2), dtype)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_arithmetic_is_torchs(make_op: MakeOp, dtype: torch.dtype, device: str) -> None:
    op = make_op(
        "turn(Tensor z, float a) -> Tensor",
        TURN_C,
        cuda=TURN_CUDA,
        fake=lambda z, a: torch.empty_like(z),
    )
    z = torch.randn(1000, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).to(
        device, dtype
    )
    torch.testing.assert_close(op(z, 0.25), turned(z, 0.25))
    with pytest.raises(RuntimeError, match="turn does not take float32"):
        op(torch.ones(2), 1.0)


def test_an_op_makes_float8_tensors_on_cuda(make_op: MakeOp, cuda_device: str) -> None:
    op = make_op(
        "quantize(Tensor x, ScalarType dtype) -> Tensor",
        cuda=QUANTIZE_CUDA,
        fake=lambda x, dtype: x.new_empty(x.shape, dtype=dtype),
    )
    for dtype in FLOAT8:
        x = torch.arange(-(2**15), 2**15, device=cuda_device).to(torch.int16).view(torch.float16)
        x = x[(x.abs() <= torch.finfo(dtype).max)]
        assert torch.equal(
            op(x, dtype).view(torch.uint8), (x.float() / 2).to(dtype).view(torch.uint8)
        )

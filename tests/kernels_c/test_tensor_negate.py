"""tensor_negate: torch.neg for every dtype, stride and size."""

from __future__ import annotations

import pytest
import torch

from opjit import Op
from opjit.declare import registry
from tests.tensors import COMPLEX, DEVICES, FLOATING, WIDE_UNSIGNED

INTEGRAL = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.fixture(scope="module")
def tensor_negate() -> Op:
    return registry.find("tensor_negate")


def numbers(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.randint(-100, 101, (count,), generator=torch.Generator().manual_seed(count)) / 4).to(dtype).to(device)


def assert_negated(op: Op, x: torch.Tensor) -> None:
    got = op(x)
    torch.testing.assert_close(got, torch.neg(x), rtol=0, atol=0, equal_nan=True)
    assert (got.dtype, got.device, got.stride()) == (x.dtype, x.device, torch.empty_like(x).stride())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_every_byte_beside_every_other_is_negated_alone(tensor_negate: Op, dtype: torch.dtype, device: str) -> None:
    every = torch.arange(256, device=device).to(torch.uint8).view(dtype)
    pairs = torch.stack((every.repeat_interleave(256), every.repeat(256)), 1).flatten()
    assert_negated(tensor_negate, pairs)
    assert_negated(tensor_negate, pairs[16:-5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_the_signs_of_zero_infinity_and_nan_turn(tensor_negate: Op, dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, 5e-324], device=device, dtype=torch.float64).to(dtype)
    for view in (x, x.repeat(9), x.repeat(9)[::2]):
        assert_negated(tensor_negate, view)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        changed = tensor_negate(view).view(bits) ^ view.contiguous().view(bits)
        assert changed.eq(torch.iinfo(bits).min).all()  # the sign and nothing else; CUDA's signbit does not see a half NaN's


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*INTEGRAL, *WIDE_UNSIGNED])
def test_integers_wrap_around(tensor_negate: Op, dtype: torch.dtype, device: str) -> None:
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, limits.min + 1, 0, 1]
    period = limits.max - limits.min + 1
    expected = [(-value - limits.min) % period + limits.min for value in values]
    assert tensor_negate(torch.tensor(values, dtype=dtype, device=device)).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_views_are_resolved(tensor_negate: Op, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(9, 8, dtype=dtype, device=device)
    for view in (x, x.conj(), x.conj().t(), x[::2, ::3], x.imag, x.conj().imag, x.real):
        assert_negated(tensor_negate, view)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_cannot_be_negated_is_refused(tensor_negate: Op, dtype: torch.dtype, device: str) -> None:
    with pytest.raises(RuntimeError, match=r"tensor_negate takes .*, not \w+") as caught:
        tensor_negate(torch.ones(3, device=device).to(dtype))
    assert ("; ~x inverts a bool tensor" in str(caught.value)) == (dtype == torch.bool)


@pytest.mark.gpu
def test_more_elements_than_an_int_counts(tensor_negate: Op) -> None:
    x = torch.ones(2**31 + 1000, dtype=torch.int8, device="cuda")
    x[-1] = 5
    out = tensor_negate(x)
    assert out[-1].item() == -5
    assert out[:: 2**20].eq(-1).all()
    assert tensor_negate(x[::2]).shape == (2**30 + 500,)
    assert tensor_negate(x.view(8, -1)[:, 1:])[-1, -1].item() == -5


def test_gradients_are_negated(tensor_negate: Op) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tensor_negate, (x,))
    assert torch.autograd.gradgradcheck(tensor_negate, (x,))
    assert torch.autograd.gradcheck(tensor_negate, (torch.randn(3, dtype=torch.complex128, requires_grad=True),))



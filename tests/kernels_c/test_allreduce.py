"""allreduce on the CPU: torch.sum's results and dtypes, an error no worse than torch's, and the same bits every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opjit import Op
from opjit.declare import registry
from tests.tensors import FLOATING, WIDE_UNSIGNED

INTEGRAL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *WIDE_UNSIGNED]


@pytest.fixture(scope="module")
def allreduce() -> Op:
    return registry.find("allreduce")


def _tolerance(dtype: torch.dtype, x: torch.Tensor) -> float:
    """Half a unit of the result's dtype, and what float32 sums may be off: a few units of the sum of magnitudes."""
    if not dtype.is_floating_point:
        return 0.0
    magnitudes = x.double().abs().sum().item()
    exact = abs(x.double().sum().item())
    return torch.finfo(dtype).eps * exact + 4 * torch.finfo(torch.float32 if dtype != torch.float64 else dtype).eps * magnitudes + 1e-300


def _check(allreduce: Op, x: torch.Tensor, **kwargs: Any) -> None:
    got, expected = allreduce(x, **kwargs), torch.sum(x, **kwargs)
    assert got.dtype == expected.dtype
    assert got.shape == ()
    if not got.dtype.is_floating_point:
        assert got.item() == expected.item()
    elif math.isfinite(expected.item()):
        assert abs(got.double().item() - expected.double().item()) <= 2 * _tolerance(got.dtype, x)
    else:
        assert str(got.item()) == str(expected.item())


@pytest.mark.torch
@pytest.mark.parametrize("result", [None, *INTEGRAL, *FLOATING])
def test_every_dtype_pair_gives_torch_sums_result(allreduce: Op, result: torch.dtype | None) -> None:
    values = [(torch.arange(2999) % 7 - (2 if dtype.is_signed else 0)).to(dtype) for dtype in (*INTEGRAL, *FLOATING)]
    for view in (view for x in values for view in (x, x[::3], x[:5], x.reshape(2999, 1).expand(2999, 2), x[:0])):
        try:
            torch.sum(view, dtype=result)
        except NotImplementedError:  # no such sum in this torch
            continue
        if result == torch.float16 or view.dtype == result == torch.bfloat16:
            expected = view.double().sum().to(result)
            assert abs(allreduce(view, dtype=result).double() - expected.double()) <= torch.finfo(result).eps * expected.abs().double()
        else:
            _check(allreduce, view, **({} if result is None else {"dtype": result}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_complex_and_float8_are_refused(allreduce: Op, dtype: torch.dtype, device: str) -> None:
    for one, result in ((dtype, None), (dtype, torch.float32), (torch.float32, dtype)):
        with pytest.raises(RuntimeError, match=r"allreduce takes .*, not .*(complex|unsupported|float8)"):
            allreduce(torch.ones(3, device=device).to(one), dtype=result)


@pytest.mark.parametrize("dtype", INTEGRAL[1:])
def test_integers_are_exact_and_wrap_as_torchs(allreduce: Op, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    for values in ([limits.max] * 3, [limits.min] * 3, [limits.max, limits.min], [limits.max] * 1000 + [1], [limits.min] * 70_001):
        x = torch.tensor(values, dtype=dtype)
        expected = (sum(values) + 2**63) % 2**64 - 2**63
        assert allreduce(x).item() == expected
        wrapped = (sum(values) - limits.min) % (limits.max - limits.min + 1) + limits.min
        assert allreduce(x, dtype=dtype).item() == wrapped


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.bool])
def test_small_integers_do_not_overflow_their_lanes(allreduce: Op, dtype: torch.dtype) -> None:
    value = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    least = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    for n in (1, 63, 64, 65, 127, 128, 255, 256, 257, 65_535, 65_536, 65_537, 1_000_003):
        assert allreduce(torch.full((n,), value, dtype=dtype)).item() == n * value
        assert allreduce(torch.full((n,), least, dtype=dtype)).item() == n * least


@pytest.mark.parametrize("dtype", [*INTEGRAL, *FLOATING])
def test_every_length_and_alignment_is_summed_once(allreduce: Op, dtype: torch.dtype) -> None:
    """Powers of two would show a wrong element; ones show a missing or doubled one."""
    x = torch.ones(2100, dtype=dtype)
    for start in range(17):
        for n in (*range(70), 511, 512, 513, 1023, 1024, 1025, 2048):
            assert allreduce(x[start:start + n], dtype=torch.int64).item() == n


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_come_through(allreduce: Op, dtype: torch.dtype, special: float) -> None:
    for n in (1, 10, 1000, 100_003):
        x = torch.ones(n, dtype=dtype)
        for at in {0, n // 2, n - 1}:
            y = x.clone()
            y[at] = special
            assert str(allreduce(y).item()) == str(special)
    both = torch.tensor([math.inf, 1, -math.inf], dtype=dtype)
    assert math.isnan(allreduce(both).item())


def test_overflow_is_infinite_as_torchs(allreduce: Op) -> None:
    assert allreduce(torch.full((10,), 60000.0, dtype=torch.float16)).item() == math.inf
    assert allreduce(torch.full((10,), 3e38)).item() == math.inf
    assert allreduce(torch.full((10,), 60000.0, dtype=torch.float16), dtype=torch.float32).item() == 600_000
    assert allreduce(torch.full((100,), 1.5e308, dtype=torch.float64)).item() == math.inf


def test_signs_of_zero_and_subnormals(allreduce: Op) -> None:
    assert allreduce(torch.empty(0)).item() == 0
    assert allreduce(torch.full((1000,), 1e-45)).item() == pytest.approx(1000 * 1.401298464324817e-45, rel=1e-6, abs=0)
    assert allreduce(torch.full((1000,), 5e-324, dtype=torch.float64)).item() == 1000 * 5e-324


def _hard_sums(n: int) -> dict[str, Callable[[torch.Generator], torch.Tensor]]:
    return {
        "uniform": lambda g: torch.rand(n, generator=g, dtype=torch.float64),
        "normal": lambda g: torch.randn(n, generator=g, dtype=torch.float64),
        "large and small": lambda g: torch.randn(n, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(-6, 7, (n,), generator=g),
        "one large": lambda g: torch.cat([torch.tensor([1e8], dtype=torch.float64), torch.rand(n, generator=g, dtype=torch.float64)]),
        "cancelling": lambda g: torch.cat([(x := torch.randn(n // 2, generator=g, dtype=torch.float64)), -x.flip(0), torch.ones(1)]),
        "rising": lambda g: torch.arange(n, dtype=torch.float64) / 7,
    }


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("kind", list(_hard_sums(0)))
@pytest.mark.parametrize("dtype", FLOATING)
def test_the_error_is_no_worse_than_torchs(allreduce: Op, dtype: torch.dtype, kind: str, layout: str) -> None:
    """Root mean square, over many inputs of different lengths, of the distance to the exact sum of the elements."""
    ours, theirs, unit = [], [], 0.0
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # before the last rounding, which both do
    for seed in range(60):
        x = _hard_sums(9_000 + 211 * seed)[kind](torch.Generator().manual_seed(seed)).to(dtype)
        x = x if layout == "contiguous" else x[::2]
        if not x.isfinite().all():
            assert dtype == torch.float16
            continue
        exact = math.fsum(x.double().tolist())
        ours.append(allreduce(x, dtype=wide).item() - exact)
        theirs.append(torch.sum(x, dtype=wide).item() - exact)
        unit = max(unit, torch.finfo(wide).eps * abs(exact))
    # A tenth more is what chance does to a mean of 60. What a single large element takes from its float lane is chance too.
    allowed = 2 * unit * math.sqrt(len(ours)) if kind == "one large" else unit / 2
    assert math.hypot(*ours) <= max(1.1 * math.hypot(*theirs), allowed)


@pytest.mark.parametrize("dtype", FLOATING)
def test_a_long_sum_is_as_good_as_its_dtype(allreduce: Op, dtype: torch.dtype) -> None:
    x = torch.rand(2_000_009, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    exact = math.fsum(x.double().tolist())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert abs(allreduce(x, dtype=wide).item() - exact) <= torch.finfo(wide).eps * exact
    if dtype != torch.float16:  # where the sum is infinite
        assert abs(allreduce(x).double().item() - exact) <= torch.finfo(dtype).eps * exact


def test_a_float64_sum_of_float32_is_that_of_doubles(allreduce: Op) -> None:
    for n in (5, 1000, 300_007):
        x = torch.randn(n, 2, generator=torch.Generator().manual_seed(n))
        for view in (x.flatten(), x[:, 0]):
            exact = math.fsum(view.double().tolist())
            assert abs(allreduce(view, dtype=torch.float64).item() - exact) <= 1e-14 * view.double().abs().sum().item()


def test_integers_to_floating_are_added_exactly(allreduce: Op) -> None:
    """Not each rounded on its own: the result is the exact sum's nearest number."""
    for dtype in (torch.int32, torch.uint32):
        x = (torch.arange(100_003, dtype=torch.int64) * 40_503 % (1 << 31) + (1 << 30)).to(dtype)
        for result in (torch.float32, torch.float64):
            assert allreduce(x, dtype=result).item() == x.to(torch.int64).sum().to(result).item()


def test_what_a_stride_of_zero_repeats_is_counted_as_often(allreduce: Op) -> None:
    for dtype in (torch.int8, torch.bool, torch.uint64, torch.float16, torch.float64):
        x = (torch.arange(24) % 5).to(dtype).reshape(4, 1, 6)
        for view in (x.expand(4, 7, 6), x[:, :, :1].expand(4, 7, 6), x[:1, :, :1].expand(4, 7, 6), x[::2].expand(2, 100_000, 6)):
            _check(allreduce, view, dtype=torch.float64)


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_same_bits_in_every_run_and_for_any_number_of_threads(allreduce: Op, threads: Callable[[int], None],
                                                                  dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for n in (1000, 100_003, 3_000_001):
        x = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
        for view in (x, x[::2], x[:n // 7 * 7].reshape(7, -1).t()):
            seen = set()
            for count in (1, 2, 3, 8):
                threads(count)
                seen |= {allreduce(view, dtype=torch.float64).item() for _ in range(3)}
            assert len(seen) == 1


def test_a_permuted_tensor_sums_to_the_same_bits(allreduce: Op) -> None:
    x = torch.randn(30, 40, 50, generator=torch.Generator().manual_seed(2))
    assert len({allreduce(x.permute(order)).item() for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))}) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32])
def test_more_elements_than_an_int_counts(allreduce: Op, dtype: torch.dtype) -> None:
    """2^31 + 24 elements without their memory: a dimension of stride 0."""
    n = (2**31 + 24) // 8
    x = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=dtype)
    exact = torch.tensor(6 * n)
    assert allreduce(x.expand(n, 8)).item() == (exact.float() if dtype.is_floating_point else exact).item()


def test_offsets_past_an_int_are_reached(allreduce: Op) -> None:
    """Elements that lie more than 2^31 elements apart; the memory between them is never touched."""
    x = torch.empty(2**31 + 100, dtype=torch.int8)[::2**30]
    x.copy_(torch.tensor([1, 2, 3]))
    assert allreduce(x).item() == 6

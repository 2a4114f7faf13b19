"""allreduce: torch.sum's results and dtypes, an error no worse than torch's, and the same bits every time; on the CPU and on a GPU."""

import math
from collections.abc import Callable, Iterable

import pytest
import torch

from opjit.catalog import registry
from tests.helpers import is_emulated
from tests.tensors import FLOATING, REAL, SMALL, WIDE_UNSIGNED

ALLREDUCE = registry.find("allreduce")


def numbers(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, device=device).to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (-100, 101) if dtype.is_signed else (0, 201)
    return torch.randint(low, high, (count,), generator=generator, device=device).to(dtype)


def exact_sum(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The sum in float64 or int64 of the elements as the result's dtype holds them."""
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    held = x.to(result)
    if result.is_floating_point:
        return held.double().sum()
    return held.any() if result == torch.bool else held.to(torch.int64).sum().to(result)


def assert_sum(x: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    got = ALLREDUCE(x, dtype=dtype)
    expected = exact_sum(x, dtype)
    assert (got.shape, got.device) == ((), x.device)
    assert got.dtype == (dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))
    if not got.dtype.is_floating_point:
        assert got.item() == expected.item()
    elif abs(expected.item()) > torch.finfo(got.dtype).max:
        assert got.isinf()
    else:
        allowed = (
            torch.finfo(got.dtype).eps * abs(expected.item())
            + 1e-6 * x.to(got.dtype).double().abs().sum().item()
        )
        assert abs(got.double().item() - expected.item()) <= allowed


@pytest.mark.parametrize("result", [None, *REAL])
def test_a_result_dtype_converts_each_element_first(
    result: torch.dtype | None, device: str
) -> None:
    for source in REAL[::5] if is_emulated() else REAL:
        x = numbers(50_021, source, device)
        if (
            source.is_floating_point
            and result is not None
            and not result.is_floating_point
            and not result.is_signed
        ):
            x = x.abs()  # a negative float has no meaning as an unsigned integer
        for view in (x, x[:99], x[::3], x[:0], x[:2999, None].expand(2999, 2)):
            assert_sum(view, result)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_complex_and_float8_are_refused(dtype: torch.dtype, device: str) -> None:
    for one, result in ((dtype, None), (dtype, torch.float32), (torch.float32, dtype)):
        with pytest.raises(
            RuntimeError, match=r"allreduce takes .*, not .*(complex|unsupported|float8)"
        ):
            ALLREDUCE(torch.ones(3, device=device).to(one), dtype=result)


@pytest.mark.parametrize("dtype", [*SMALL[1:], *WIDE_UNSIGNED])
def test_integers_are_exact_and_wrap_as_torchs(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    for values in (
        [limits.max] * 3,
        [limits.min] * 3,
        [limits.max, limits.min],
        [limits.max] * 1000 + [1],
        [limits.min] * 70_001,
    ):
        x = torch.tensor(values, dtype=dtype)
        expected = (sum(values) + 2**63) % 2**64 - 2**63
        assert ALLREDUCE(x).item() == expected
        wrapped = (sum(values) - limits.min) % (limits.max - limits.min + 1) + limits.min
        assert ALLREDUCE(x, dtype=dtype).item() == wrapped


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.bool])
def test_small_integers_do_not_overflow_their_lanes(dtype: torch.dtype) -> None:
    value = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    least = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    for n in (1, 63, 64, 65, 127, 128, 255, 256, 257, 65_535, 65_536, 65_537, 1_000_003):
        assert ALLREDUCE(torch.full((n,), value, dtype=dtype)).item() == n * value
        assert ALLREDUCE(torch.full((n,), least, dtype=dtype)).item() == n * least


@pytest.mark.parametrize("dtype", REAL)
def test_every_length_and_alignment_is_summed_once(dtype: torch.dtype, device: str) -> None:
    of_vectors = [*range(70), 511, 512, 513, 1023, 1024, 1025, 2048]
    of_blocks = [
        0,
        1,
        15,
        16,
        17,
        511,
        512,
        513,
        4097,
        32_767,
        32_769,
        65_537,
        131_073,
        1_000_003,
        9_999_991,
    ]
    lengths = of_vectors if device == "cpu" else of_blocks
    starts: Iterable[int] = range(17) if device == "cpu" else (0, 1, 3)
    if is_emulated():
        lengths = [0, 1, 15, 16, 17, 513, 4097, 32_769]
        starts = (0, 3)
    x = numbers(lengths[-1] + 17, dtype, device)
    for start in starts:
        for n in lengths:
            part = x[start : start + n]
            assert ALLREDUCE(part, dtype=torch.int64).item() == part.to(torch.int64).sum().item()


@pytest.mark.parametrize("dtype", REAL)
def test_strides_do_not_change_the_sum(dtype: torch.dtype, device: str) -> None:
    """What a stride of 0 repeats is counted as often."""
    columns = 12 if is_emulated() else 74
    x = numbers(66 * 70 * columns, dtype, device).reshape(66, 70, columns)
    for view in (
        x.transpose(0, 2),
        x[1::3, ::2, 3:71],
        x[0].expand(5, 70, columns),
        x[:, 3, :],
        x.permute(1, 2, 0)[::2],
        x[::65, ::69, :: columns - 1],
        x.flatten()[::7],
        x[0, 0, 0].expand(1000),
        x[:4, None, 0, :9].expand(4, 7, 9),
        x[::2, :1].expand(33, 300, columns),
    ):
        assert_sum(view)
        assert_sum(view, torch.float64)


def _rows_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of 2^17 elements whose rows, or the columns of whose rows, are added in another way."""
    return {
        "columns of short rows": x.view(-1, 4)[:, :3],
        "one column": x.view(-1, 64)[:, 5],
        "columns of two dimensions": x.view(-1, 8, 8)[:, 2:6, 2:6],
        "columns far apart": x.view(-1, 1024)[:, 7:12],
        "overlapping": x[: 1 << 14].unfold(0, 8, 2),
        "rows of a vector and more": x.view(-1, 16)[:, :10],
        "rows of vectors and a few": x.view(-1, 32)[1:, :30],
        "rows of steps": x.view(-1, 256)[:-3, 1:250],
        "rows far apart": x.view(-1, 1024)[:, :100],
        "rows of strided elements": x.view(-1, 256)[:, ::3],
        "few rows of strided elements": x.view(3 if len(x) % 3 == 0 else 4, -1)[:, 1::5],
        "rows longer than a block": x.view(-1, 1024)[:, :1000],
        "rows longer than a chunk": x.view(2, -1)[:, : len(x) // 2 - 9],
        "few short rows": x.view(-1, 4, 1024)[:, :3, 1:10],
        "three dimensions": x.view(-1, 32, 64)[:, ::2, ::3],
        "strided": x[::7],
    }


@pytest.mark.parametrize("layout", list(_rows_of(torch.empty(1 << 17))))
def test_rows_and_columns_are_added_once(layout: str, threads: Callable[[int], None]) -> None:
    """Of every dtype, as themselves and converted, and with the same bits for any number of threads."""
    for dtype in REAL:
        x = _rows_of(numbers(1 << 17, dtype, "cpu"))[layout]
        assert_sum(x)
        assert_sum(x, torch.float64)
        assert_sum(x, torch.int64)
        seen = set()
        for count in (1, 2, 3):
            threads(count)
            seen.add(ALLREDUCE(x).item())
        assert len(seen) == 1


@pytest.mark.parametrize(
    "layout", ["rows of a vector and more", "strided", "rows of strided elements"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_and_columns_are_added_no_less_exactly_than_torchs(
    dtype: torch.dtype, layout: str
) -> None:
    ours = []
    theirs = []
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sizes = 10.0 ** torch.randint(-3, 4, (1 << 17,), generator=generator)
        x = _rows_of((torch.rand(1 << 17, generator=generator).double() * sizes).to(dtype))[layout]
        exact = math.fsum(x.double().flatten().tolist())
        ours.append(ALLREDUCE(x, dtype=wide).item() - exact)
        theirs.append(torch.sum(x, dtype=wide).item() - exact)
    assert math.hypot(*ours) <= 1.1 * math.hypot(*theirs)


def test_overflow_is_infinite_as_torchs() -> None:
    assert ALLREDUCE(torch.full((10,), 60000.0, dtype=torch.float16)).item() == math.inf
    assert ALLREDUCE(torch.full((10,), 3e38)).item() == math.inf
    assert (
        ALLREDUCE(torch.full((10,), 60000.0, dtype=torch.float16), dtype=torch.float32).item()
        == 600_000
    )
    assert ALLREDUCE(torch.full((100,), 1.5e308, dtype=torch.float64)).item() == math.inf


def test_signs_of_zero_and_subnormals() -> None:
    assert ALLREDUCE(torch.empty(0)).item() == 0
    assert ALLREDUCE(torch.full((1000,), 1e-45)).item() == pytest.approx(
        1000 * 1.401298464324817e-45, rel=1e-6, abs=0
    )
    assert ALLREDUCE(torch.full((1000,), 5e-324, dtype=torch.float64)).item() == 1000 * 5e-324


def _hard_sums(n: int) -> dict[str, Callable[[torch.Generator], torch.Tensor]]:
    return {
        "uniform": lambda g: torch.rand(n, generator=g, dtype=torch.float64),
        "normal": lambda g: torch.randn(n, generator=g, dtype=torch.float64),
        "large and small": lambda g: (
            torch.randn(n, generator=g, dtype=torch.float64)
            * 10.0 ** torch.randint(-6, 7, (n,), generator=g)
        ),
        "one large": lambda g: torch.cat(
            [
                torch.tensor([1e8], dtype=torch.float64),
                torch.rand(n, generator=g, dtype=torch.float64),
            ]
        ),
        "canceling": lambda g: torch.cat(
            [
                (x := torch.randn(n // 2, generator=g, dtype=torch.float64)),
                -x.flip(0),
                torch.ones(1),
            ]
        ),
        "rising": lambda g: torch.arange(n, dtype=torch.float64) / 7,
    }


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("kind", list(_hard_sums(0)))
@pytest.mark.parametrize("dtype", FLOATING)
def test_the_error_is_no_worse_than_torchs(dtype: torch.dtype, kind: str, layout: str) -> None:
    """Root mean square, over many inputs of different lengths, of the distance to the exact sum of the elements."""
    ours = []
    theirs = []
    unit = 0.0
    # Before the last rounding, which both do.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for seed in range(60):
        x = _hard_sums(9_000 + 211 * seed)[kind](torch.Generator().manual_seed(seed)).to(dtype)
        x = x if layout == "contiguous" else x[::2]
        if not x.isfinite().all():
            assert dtype == torch.float16
            continue
        exact = math.fsum(x.double().tolist())
        ours.append(ALLREDUCE(x, dtype=wide).item() - exact)
        theirs.append(torch.sum(x, dtype=wide).item() - exact)
        unit = max(unit, torch.finfo(wide).eps * abs(exact))
    # A tenth more is what chance does to a mean of 60. What a single large element takes from its float lane is chance too.
    allowed = 2 * unit * math.sqrt(len(ours)) if kind == "one large" else unit / 2
    assert math.hypot(*ours) <= max(1.1 * math.hypot(*theirs), allowed)


def test_a_float64_sum_of_float32_is_that_of_doubles() -> None:
    for n in (5, 1000, 300_007):
        x = torch.randn(n, 2, generator=torch.Generator().manual_seed(n))
        for view in (x.flatten(), x[:, 0]):
            exact = math.fsum(view.double().tolist())
            assert (
                abs(ALLREDUCE(view, dtype=torch.float64).item() - exact)
                <= 1e-14 * view.double().abs().sum().item()
            )


def test_integers_to_floating_are_added_exactly() -> None:
    """Not each rounded on its own: the result is the exact sum's nearest number."""
    for dtype in (torch.int32, torch.uint32):
        x = (torch.arange(100_003, dtype=torch.int64) * 40_503 % (1 << 31) + (1 << 30)).to(dtype)
        for result in (torch.float32, torch.float64):
            assert ALLREDUCE(x, dtype=result).item() == x.to(torch.int64).sum().to(result).item()


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_same_bits_in_every_run_and_for_any_number_of_threads(
    threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    for n in (1000, 100_003, 3_000_001):
        x = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
        for view in (x, x[::2], x[: n // 7 * 7].reshape(7, -1).t()):
            seen = set()
            for count in (1, 2, 3, 8):
                threads(count)
                seen |= {ALLREDUCE(view, dtype=torch.float64).item() for _ in range(3)}
            assert len(seen) == 1


def test_a_permuted_tensor_sums_to_the_same_bits() -> None:
    x = torch.randn(30, 40, 50, generator=torch.Generator().manual_seed(2))
    assert (
        len(
            {
                ALLREDUCE(x.permute(order)).item()
                for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))
            }
        )
        == 1
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32])
def test_more_elements_than_an_int_counts(dtype: torch.dtype) -> None:
    """2^31 + 24 elements without their memory: a dimension of stride 0."""
    n = (2**31 + 24) // 8
    x = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=dtype)
    exact = torch.tensor(6 * n)
    assert (
        ALLREDUCE(x.expand(n, 8)).item()
        == (exact.float() if dtype.is_floating_point else exact).item()
    )


def test_offsets_past_an_int_are_reached() -> None:
    """Elements that lie more than 2^31 elements apart; the memory between them is never touched."""
    x = torch.empty(2**31 + 100, dtype=torch.int8)[:: 2**30]
    x.copy_(torch.tensor([1, 2, 3]))
    assert ALLREDUCE(x).item() == 6


def test_a_gpu_s_float32_is_no_less_exact_than_torch_s(cuda_device: str) -> None:
    mine = theirs = 0.0
    for seed in range(8):
        x = torch.rand(
            10_019 if is_emulated() else 10_000_019,
            generator=torch.Generator(device=cuda_device).manual_seed(seed),
            device=cuda_device,
        )
        exact = x.double().sum().item()
        mine += abs(ALLREDUCE(x).item() - exact)
        theirs += abs(x.sum().item() - exact)
    assert mine <= theirs


def test_a_gpu_s_bits_are_the_same_each_time(cuda_device: str) -> None:
    times = 3 if is_emulated() else 200
    for count in (1000, 30_017 if is_emulated() else 3_000_017):
        x = numbers(count, torch.float32, cuda_device)
        first = ALLREDUCE(x)
        assert all(torch.equal(ALLREDUCE(x), first) for _ in range(times))


@pytest.mark.gpu
def test_a_gpu_sums_more_than_two_to_the_31_elements() -> None:
    count = (1 << 31) + 12_345
    x = torch.ones(count, dtype=torch.int8, device="cuda")
    assert ALLREDUCE(x).item() == count
    assert ALLREDUCE(x[::1].as_strided((count // 2,), (2,))).item() == count // 2
    assert (
        ALLREDUCE(torch.ones((), dtype=torch.int16, device="cuda").expand(3, 1 << 30)).item()
        == 3 << 30
    )
    # Not one dimension: their indices are divided.
    rows = torch.ones(40_000, 60_000, dtype=torch.int8, device="cuda")[:, 1:]
    assert ALLREDUCE(rows).item() == rows.numel() > 1 << 31


@pytest.mark.gpu
def test_calls_on_two_streams_at_once_do_not_mix() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [torch.full((2_000_003,), float(i + 1), device="cuda") for i in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(200):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(ALLREDUCE(x))
    torch.cuda.synchronize()
    assert all(result.item() == 2_000_003.0 * (i % 4 + 1) for i, result in enumerate(results))


@pytest.mark.gpu
def test_a_stream_that_has_a_part_of_the_device_gets_the_sum() -> None:
    """There, fewer blocks are resident at once than the device as a whole could hold."""
    green_contexts = pytest.importorskip(
        "torch.cuda.green_contexts", reason="this torch has no green contexts"
    )
    x = torch.ones(50_000_000, device="cuda")
    strided = torch.ones(20_000_000, device="cuda")[::2]
    try:
        context = green_contexts.GreenContext.create(16, 0)
    except RuntimeError as error:
        pytest.skip(f"no green context can be made here: {error}")
    context.set_context()
    try:
        assert ALLREDUCE(x).item() == 50_000_000
        assert ALLREDUCE(strided).item() == 10_000_000
    finally:
        context.pop_context()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_on_another_device_than_the_current_one() -> None:
    x = torch.ones(3_000_000, device="cuda:1")
    result = ALLREDUCE(x)
    assert result.device == x.device
    assert result.item() == 3_000_000
    assert torch.cuda.current_device() == 0

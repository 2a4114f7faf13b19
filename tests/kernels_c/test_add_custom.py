"""add_custom: torch.add's sizes, strides, dtypes and numbers; a backward that moves nothing where nothing has to move."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opjit.catalog import registry
from tests.tensors import COMPILES, COMPLEX, FLOATING, REAL, WIDE_UNSIGNED, Seen

ADD = registry.find("add_custom")


def numbers(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> torch.Tensor:
    """Whole numbers and halves, of either sign where the dtype has one."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype == torch.bool else (-200, 201) if dtype.is_signed else (0, 256)
    values = torch.randint(low, high, shape, generator=generator)
    return (
        (values / 2 if dtype.is_floating_point or dtype.is_complex else values).to(dtype).to(device)
    )


def assert_as_torch(x: torch.Tensor, y: torch.Tensor) -> None:
    got = ADD(x, y)
    expected = torch.add(x, y)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_round_as_torchs_over_all_their_values(dtype: torch.dtype, device: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    for seed in range(4):
        y = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(device)]
        got = ADD(x, y)
        expected = x + y
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~got.isnan())


@pytest.mark.parametrize("one", REAL)
def test_dtypes_are_promoted_as_torchs(one: torch.dtype, device: str) -> None:
    """Of tensors with and without dimensions, which count less."""
    pairs = [(numbers((3, 350), one, device, 1), numbers((3, 350), two, device, 2)) for two in REAL]
    for a, b in (
        views
        for x, y in pairs
        for views in (
            (x, y),
            (x, y[0, 0]),
            (x[0, 0], y),
            (x[0, 0], y[0, 0]),
            (x, y[:1, :1]),
            (x[:, ::2], y[:, 1::2]),
            (x[0, 0], y.t()),
        )
    ):
        try:
            result = torch.result_type(a, b)
        except RuntimeError:
            with pytest.raises(
                RuntimeError,
                match=r"have no common dtype in torch; convert one of them with \.to\(\)",
            ):
                ADD(a, b)
            continue
        got = ADD(a, b)
        assert got.dtype == result
        expected = (
            a.to(result) + b.to(result)
            if result not in WIDE_UNSIGNED
            else (a.to(torch.int64) + b.to(torch.int64)).to(result)
        )
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_one_element_rounds_as_a_row_does(half: torch.dtype) -> None:
    """The row of one element is contiguous for a tensor without dimensions, whose dtype is that of the addition."""
    for size in (0, 1, 2):
        x = torch.full((size,), 2**-11, dtype=half)
        y = torch.tensor(1 + 2**-11)
        assert_as_torch(x, y)
        assert_as_torch(y, x)


@pytest.mark.parametrize("one", REAL)
def test_two_dtypes_are_added_piece_by_piece(one: torch.dtype) -> None:
    """Rows that are longer than the buffers of converted elements, and end anywhere."""
    for two in REAL:
        if two in WIDE_UNSIGNED or one in WIDE_UNSIGNED:
            continue  # torch adds none
        x = numbers((9001,), one, seed=1)
        y = numbers((9001,), two, seed=2)
        for a, b in (
            (x, y),
            (x[:4097], y[1:4098]),
            (x[::2], y[:4501]),
            (x[::3], y[:3001]),
            (x, y[:1].expand(9001)),
            (x[:8990].view(5, -1), y[:1798]),
            (x[:8990].view(5, -1).t(), y[:5]),
        ):
            assert_as_torch(a, b)


def test_conversions_round_as_torchs(device: str) -> None:
    """Numbers that the result's dtype does not hold: they are converted first, then added."""
    large = torch.tensor(
        [
            2**24 + 1,
            2**53 + 1,
            2**62 + 2**38 + 1,
            -(2**63),
            2**63 - 1,
            65519,
            65520,
            -100_001,
            2049,
        ],
        device=device,
    )
    for dtype in FLOATING:
        for other in (
            torch.zeros(9, 1, dtype=dtype, device=device),
            torch.full((9, 1), 0.75, dtype=dtype, device=device),
        ):
            assert_as_torch(large, other)
            assert_as_torch(other, large[:, None])
            assert_as_torch(other, large[7])
    fine = torch.tensor(
        [1 / 3, 1e300, -1e-300, 3.4e38, 70_000.0, torch.nan], dtype=torch.float64, device=device
    )
    for dtype in FLOATING[:3]:
        for scalar in fine:
            assert_as_torch(torch.ones(5, dtype=dtype, device=device), scalar)
    wide = torch.tensor(300, device=device)
    assert_as_torch(torch.ones(5, dtype=torch.int8, device=device), wide)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_numbers_of_one_dtype_are_added(dtype: torch.dtype) -> None:
    x = torch.randn(40, 30, dtype=dtype)
    y = torch.randn(40, 30, dtype=dtype)
    for a, b in (
        (x, y),
        (x.t(), y.t()),
        (x[::2, ::3], y[::2, ::3]),
        (x, y[0]),
        (x[:, :1], y[:1]),
        (x.conj(), y),
        (x.real, y.imag),
    ):
        assert_as_torch(a, b)
    for a, b in (
        (x, y.real),
        (x.real, y),
        (x, torch.tensor(1j, dtype=COMPLEX[dtype == COMPLEX[0]])),
        (x.real.bfloat16(), y[0, 0]),
        (x[0, 0], y.real.half()),
    ):
        for device in ("cpu", "meta"):
            with pytest.raises(
                RuntimeError,
                match=r"add_custom takes two complex tensors of one dtype, not \S+ and \S+",
            ):
                ADD(a.to(device), b.to(device))


def test_other_dtypes_are_refused() -> None:
    x = torch.ones(3, dtype=torch.float32).to(torch.float8_e4m3fn)
    with pytest.raises(
        RuntimeError,
        match="add_custom takes bool, integers, floating and complex dtypes, not float8_e4m3fn",
    ):
        ADD(x, x)
    for pair in ((x, torch.ones(3)), (torch.ones(3), x[0])):
        with pytest.raises(
            RuntimeError,
            match=r"float8_e4m3fn cannot be combined with another dtype; convert it with \.to",
        ):
            ADD(*pair)
        with pytest.raises(
            RuntimeError,
            match=r"add_custom takes bool, integers, floating and complex dtypes, not ",
        ):
            ADD(*(one.to("meta") for one in pair))
    backward = registry.find("add_custom_backward")
    for device in ("cpu", "meta"):
        with pytest.raises(
            RuntimeError,
            match="add_custom_backward takes bool, integers, floating and complex dtypes",
        ):
            backward(x.to(device))


def test_sizes_that_disagree_are_named() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"expected sizes that broadcast: .*; dimension -2 has 3 in one tensor and 4 in the other",
    ):
        ADD(torch.ones(2, 3, 5), torch.ones(4, 5))
    with pytest.raises(RuntimeError, match="dimension -1 has 0 in one tensor and 2 in the other"):
        ADD(torch.ones(0), torch.ones(2))
    with pytest.raises(RuntimeError, match=r"must match|broadcast"):
        ADD(torch.empty(2, device="meta"), torch.empty(3, device="meta"))


@st.composite
def operands(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that broadcast, each a permuted, cut, expanded or plain view."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=5))
    dtypes = draw(
        st.sampled_from(
            [
                (torch.float32, torch.float32),
                (torch.int16, torch.int16),
                (torch.bfloat16, torch.float32),
                (torch.uint8, torch.int64),
                (torch.complex64, torch.complex64),
            ]
        )
    )

    def view(dtype: torch.dtype) -> torch.Tensor:
        own = [
            1 if draw(st.integers(0, 3)) == 0 else size
            for size in sizes[draw(st.integers(0, len(sizes))) :]
        ]
        order: list[int] = draw(st.permutations(list(range(len(own)))))
        steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in own]
        made = numbers(tuple(own[d] * steps[d] for d in order), dtype, seed=len(own))
        back = [order.index(d) for d in range(len(own))]
        cut = made.permute(back)[tuple(slice(None, None, step) for step in steps)]
        if draw(st.booleans()) and own:
            d = draw(st.integers(0, len(own) - 1))
            cut = cut.narrow(d, 0, 1).expand(own) if own[d] else cut
        return cut

    return view(dtypes[0]), view(dtypes[1])


@given(operands())
@settings(max_examples=400, deadline=None)
def test_any_views_broadcast_as_torchs(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = pair
    got = ADD(x, y)
    meta = ADD(meta_of(x), meta_of(y))
    torch.testing.assert_close(got, torch.add(x, y), rtol=0, atol=0)
    assert (got.shape, got.dtype) == (meta.shape, meta.dtype)
    if got.numel():  # where strides mean nothing, torch.empty_like itself gives a meta tensor others than a real one
        assert [s for s, n in zip(got.stride(), got.shape, strict=True) if n > 1] == [
            s for s, n in zip(meta.stride(), meta.shape, strict=True) if n > 1
        ]


def meta_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def test_layouts_are_kept_as_torch_keeps_them() -> None:
    x = torch.randn(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    odd = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for layout in (x, last, odd, x[:, ::2], last[:, ::2], odd[..., ::2]):
        for other in (
            layout,
            x[:, ::2] if layout.shape[1] == 2 else x[..., ::2] if layout.shape[3] == 3 else x,
            torch.tensor(1.0),
            torch.ones(1),
            torch.ones(layout.shape[1], 1, 1),
        ):
            assert ADD(layout, other).stride() == torch.add(layout, other).stride()
            assert (
                other.shape == layout.shape
                or ADD(other, layout).stride() == torch.add(other, layout).stride()
            )


def test_only_the_asked_gradient_is_made() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = torch.randn(5, requires_grad=True)
    grad = torch.ones(4, 5)
    for asked, sums in ((x, 0), (y, 1)):
        out = ADD(
            x.detach().requires_grad_(False) if asked is y else x, y.detach() if asked is x else y
        )
        with Seen() as seen:
            torch.autograd.grad(out, asked, grad)
        assert len([op for op in seen.ops if op.overloadpacket == torch.ops.aten.sum]) == sums


@COMPILES
@pytest.mark.parametrize("sizes", [(3,), (1, 3), (1, 1), (2, 1, 3)])
def test_beside_a_size_that_only_data_tell_a_bias_broadcasts_and_has_a_gradient(
    sizes: tuple[int, ...],
) -> None:
    torch._dynamo.reset()

    def positive(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ADD.overload(bias, x[x[:, 0] > 0])
        return result

    x = torch.randn(9, 3)
    bias = torch.randn(sizes, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(positive, backend="aot_eager", fullgraph=True)(x, bias)
        expected = positive(x, bias)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(each.square().sum(), bias) for each in (got, expected))
        )

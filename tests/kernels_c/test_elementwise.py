"""add_custom, tensor_negate and round_ste: exactly torch's numbers for every dtype, length, alignment and stride."""

import itertools
import math
from collections.abc import Callable, Iterable

import pytest
import torch

from opjit.catalog import registry
from tests.tensors import COMPLEX, FLOATING, SMALL, WIDE_UNSIGNED, Seen

REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "add_custom": torch.add,
    "tensor_negate": torch.neg,
    "round_ste": lambda x: (x > 0.5).to(x.dtype),
}
NUMBERS = [*SMALL[1:], *FLOATING, *COMPLEX]
DTYPES = {"add_custom": [torch.bool, *NUMBERS], "tensor_negate": NUMBERS, "round_ste": FLOATING}
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, dtypes in DTYPES.items()
    for dtype in dtypes
]


def operands(name: str, dtype: torch.dtype, device: str, *shape: int) -> list[torch.Tensor]:
    """Quarters of whole numbers, of either sign where the dtype has one; for round_ste about a half."""
    generator = torch.Generator().manual_seed(1)
    span = 1 if name == "round_ste" else 25
    found = [
        torch.randint(-4 * span, 4 * span + 1, shape, generator=generator) / 4
        for _ in range(2 if name == "add_custom" else 1)
    ]
    return [(x if dtype.is_signed else x.abs()).to(dtype).to(device) for x in found]


def assert_exact(name: str, *args: torch.Tensor) -> None:
    got = registry.find(name)(*args)
    expected = REFERENCES[name](*args)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert (got.dtype, got.device, got.stride()) == (
        expected.dtype,
        expected.device,
        torch.empty_like(args[0]).stride(),
    )
    if name == "round_ste":
        assert not got.signbit().any()


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x.permute(2, 0, 1),
    lambda x: x[1::3, ::2, 3:31],
    lambda x: x[0, 0, 0].expand(100),
    lambda x: x[:, :1].expand_as(x),
    lambda x: x.as_strided((20, 30), (1, 2)),  # of overlapping rows
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_length_alignment_and_stride(name: str, dtype: torch.dtype, device: str) -> None:
    first, *others = operands(name, dtype, device, 2200)
    for start in (0, 1, 3, 8):
        for n in (*range(40), 63, 64, 65, 127, 128, 129, 511, 512, 513, 2049):
            assert_exact(name, first[start : start + n], *(other[:n] for other in others))
    first, *others = operands(name, dtype, device, 66, 70, 34)
    for view in VIEWS:
        assert_exact(name, view(first), *(view(x) for x in others))
        assert_exact(name, view(first), *(view(x).contiguous() for x in others))


def test_the_straight_through_backward_moves_no_data(device: str) -> None:
    leaf = torch.rand(5, 7, device=device, requires_grad=True)
    out = registry.find("round_ste")(leaf)
    grad = torch.randn(5, 7, device=device)
    with Seen() as seen:
        (found,) = torch.autograd.grad(out, leaf, grad)
    assert seen.ops == []
    assert (found.data_ptr(), found.stride()) == (grad.data_ptr(), grad.stride())


def test_a_backward_of_add_custom_without_broadcasting_is_one_call_of_its_op(device: str) -> None:
    leaves = [torch.rand(5, 7, device=device, requires_grad=True) for _ in range(2)]
    out = registry.find("add_custom")(*leaves)
    grad = torch.randn(7, 5, device=device).t()
    with Seen() as seen:
        found = torch.autograd.grad(out, leaves, grad)
    assert seen.ops == [torch.ops.opjit.add_custom_backward.default]
    for each in found:
        torch.testing.assert_close(each, grad, rtol=0, atol=0)
        assert each.stride() == grad.stride()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("tensor_negate", dtype) for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex32)),
        *(
            ("round_ste", dtype)
            for dtype in (
                torch.bool,
                torch.uint8,
                torch.int64,
                torch.complex64,
                torch.float8_e4m3fn,
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_other_dtypes_are_refused(name: str, dtype: torch.dtype, device: str) -> None:
    taken = {"tensor_negate": ".*", "round_ste": "float16, bfloat16, float32 or float64"}[name]
    for where in (device, "meta"):
        with pytest.raises(RuntimeError, match=rf"{name} takes {taken}, not \w+") as caught:
            registry.find(name)(torch.ones(3, device=where).to(dtype))
        assert ("; ~x inverts a bool tensor" in str(caught.value)) == (
            (name, dtype) == ("tensor_negate", torch.bool)
        )


@pytest.mark.parametrize("dtype", [*SMALL[1:], *WIDE_UNSIGNED])
def test_integers_wrap_around(dtype: torch.dtype, device: str) -> None:
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, 1, limits.max - 1, limits.min + 1, 0]
    x, y = (
        torch.tensor(list(column), dtype=dtype, device=device)
        for column in zip(*itertools.product(values, values), strict=True)
    )

    def wrapped(exact: Iterable[int]) -> list[int]:
        return [
            (number - limits.min) % (limits.max - limits.min + 1) + limits.min for number in exact
        ]

    sums = wrapped(a + b for a, b in itertools.product(values, values))
    add_custom = registry.find("add_custom")
    assert add_custom(x, y).tolist() == sums
    assert add_custom(x[::2], y[::2]).tolist() == sums[::2]
    assert registry.find("tensor_negate")(x).tolist() == wrapped(-a for a in x.tolist())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("add_custom", torch.int8), ("tensor_negate", torch.int8), ("round_ste", torch.float16)],
)
def test_more_elements_than_an_int_counts(name: str, dtype: torch.dtype) -> None:
    x = torch.ones(2**31 + 1000, dtype=dtype, device="cuda")
    x[-1] = x[2**31] = 0
    for view in (x, x.view(8, -1).t(), x.view(8, -1)[:, 1:]):
        args = (view,) * (2 if name == "add_custom" else 1)
        assert torch.equal(registry.find(name)(*args), REFERENCES[name](*args))


@pytest.mark.parametrize("dtype", FLOATING)
def test_exactly_a_half_and_numbers_outside_zero_to_one(dtype: torch.dtype, device: str) -> None:
    half = torch.tensor(0.5, dtype=dtype)
    above, below = (
        torch.nextafter(half, torch.tensor(to, dtype=dtype)).item() for to in (1.0, 0.0)
    )
    expected = {
        0.5: 0,
        above: 1,
        below: 0,
        0.0: 0,
        1.0: 1,
        1.5: 1,
        100.0: 1,
        -0.6: 0,
        -1.0: 0,
        -100.0: 0,
        math.inf: 1,
        -math.inf: 0,
    }
    x = torch.tensor([*expected, math.nan, -math.nan], dtype=dtype, device=device)
    assert registry.find("round_ste")(x).tolist() == [*expected.values(), 0, 0]
    if dtype.itemsize == 2:  # every half that there is
        assert_exact(
            "round_ste", torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_every_byte_beside_every_other_is_negated_alone(dtype: torch.dtype, device: str) -> None:
    every = torch.arange(256, device=device).to(torch.uint8).view(dtype)
    pairs = torch.stack((every.repeat_interleave(256), every.repeat(256)), 1).flatten()
    assert_exact("tensor_negate", pairs)
    assert_exact("tensor_negate", pairs[16:-5])


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_signs_of_zero_infinity_and_nan_turn(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, 5e-324],
        device=device,
        dtype=torch.float64,
    ).to(dtype)
    for view in (x, x.repeat(9), x.repeat(9)[::2]):
        assert_exact("tensor_negate", view)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        changed = registry.find("tensor_negate")(view).view(bits) ^ view.contiguous().view(bits)
        assert changed.eq(
            torch.iinfo(bits).min
        ).all()  # the sign and nothing else; CUDA's signbit does not see a half NaN's

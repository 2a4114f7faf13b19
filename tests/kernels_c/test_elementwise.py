"""add_custom, tensor_negate and round_ste: exactly torch's numbers for every length, alignment and stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from opjit.declare import registry
from tests.tensors import COMPLEX, DEVICES, FLOATING

INTEGRAL = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "add_custom": torch.add,
    "tensor_negate": torch.neg,
    "round_ste": lambda x: (x > 0.5).to(x.dtype),
}
NUMBERS = [*INTEGRAL, *FLOATING, *COMPLEX]
DTYPES = {"add_custom": [torch.bool, *NUMBERS], "tensor_negate": NUMBERS, "round_ste": FLOATING}
CASES = [pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}") for name, dtypes in DTYPES.items() for dtype in dtypes]


def operands(name: str, dtype: torch.dtype, device: str, *shape: int) -> list[torch.Tensor]:
    """Quarters of whole numbers, of either sign where the dtype has one; for round_ste about a half."""
    generator = torch.Generator().manual_seed(1)
    span = 1 if name == "round_ste" else 25
    found = [torch.randint(-4 * span, 4 * span + 1, shape, generator=generator) / 4 for _ in range(2 if name == "add_custom" else 1)]
    return [(x if dtype.is_signed else x.abs()).to(dtype).to(device) for x in found]


def assert_exact(name: str, args: list[torch.Tensor]) -> None:
    got, expected = registry.find(name)(*args), REFERENCES[name](*args)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got.stride() == torch.empty_like(args[0]).stride()
    if name == "round_ste":
        assert not got.signbit().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_length_and_alignment(name: str, dtype: torch.dtype, device: str) -> None:
    first, *others = operands(name, dtype, device, 2200)
    for start in (0, 1, 3, 8):
        for n in (*range(40), 63, 64, 65, 127, 128, 129, 511, 512, 513, 2049):
            assert_exact(name, [first[start:start + n], *(other[:n] for other in others)])


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x.permute(2, 0, 1),
    lambda x: x[1::3, ::2, 3:31],
    lambda x: x[0].expand(5, 70, 34),
    lambda x: x[:, 3],
    lambda x: x[0, 0, 0].expand(100),
    lambda x: x[:, :1].expand_as(x),
    lambda x: x.as_strided((20, 30), (1, 2)),  # of overlapping rows
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_stride(name: str, dtype: torch.dtype, device: str) -> None:
    args = operands(name, dtype, device, 66, 70, 34)
    for view in VIEWS:
        assert_exact(name, [view(x) for x in args])
        assert_exact(name, [view(args[0]), *(view(x).contiguous() for x in args[1:])])

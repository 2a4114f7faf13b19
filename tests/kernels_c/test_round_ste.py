"""round_ste: 1 above a half, else 0; and a gradient that comes through untouched."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from opjit import Op
from opjit.declare import registry
from tests import helpers
from tests.tensors import DEVICES, FLOATING, Seen

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def round_ste() -> Op:
    return registry.find("round_ste")


def assert_rounded(op: Op, x: torch.Tensor) -> None:
    got = op(x)
    assert torch.equal(got, (x > 0.5).to(x.dtype))
    assert not got.signbit().any()
    assert (got.dtype, got.device, got.stride()) == (x.dtype, x.device, torch.empty_like(x).stride())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_exactly_a_half_and_numbers_outside_zero_to_one(round_ste: Op, dtype: torch.dtype, device: str) -> None:
    half = torch.tensor(0.5, dtype=dtype)
    above, below = (torch.nextafter(half, torch.tensor(to, dtype=dtype)).item() for to in (1.0, 0.0))
    expected = {0.5: 0, above: 1, below: 0, 0.0: 0, 1.0: 1, 1.5: 1, 100.0: 1, -0.6: 0, -1.0: 0, -100.0: 0, math.inf: 1,
                -math.inf: 0}
    x = torch.tensor(list(expected), dtype=dtype, device=device)
    assert round_ste(x).tolist() == list(expected.values())
    nan = torch.tensor([math.nan, -math.nan], dtype=dtype, device=device)
    assert round_ste(nan).tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_there_is(round_ste: Op, dtype: torch.dtype, device: str) -> None:
    assert_rounded(round_ste, torch.arange(-2**15, 2**15, dtype=torch.int16, device=device).view(dtype))


@pytest.mark.gpu
def test_more_elements_than_an_int_counts(round_ste: Op) -> None:
    x = torch.zeros(2**31 + 1000, dtype=torch.float16, device="cuda")
    x[-1] = 1
    x[2**31] = 0.75
    assert round_ste(x).nonzero().flatten().tolist() == [2**31, 2**31 + 999]
    assert round_ste(x.view(8, -1).t()).nonzero().tolist() == [[(2**31 + 1000) // 8 - 1 - 999, 7], [(2**31 + 1000) // 8 - 1, 7]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(round_ste: Op, dtype: torch.dtype) -> None:
    expected = r"round_ste takes float16, bfloat16, float32 or float64, not "
    with pytest.raises(RuntimeError, match=expected):
        round_ste(torch.ones(3).to(dtype))
    with pytest.raises(RuntimeError, match=expected):
        round_ste(torch.empty(3, dtype=dtype, device="meta"))


@pytest.mark.parametrize("device", DEVICES)
def test_the_backward_moves_no_data(round_ste: Op, device: str) -> None:
    x = torch.rand(5, 7, device=device, requires_grad=True)
    out, grad = round_ste(x), torch.randn(5, 7, device=device)
    with Seen() as seen:
        (through,) = torch.autograd.grad(out, x, grad)
    assert seen.ops == []
    assert through.data_ptr() == grad.data_ptr()
    assert through.stride() == grad.stride()


@pytest.mark.slow
def test_the_example_for_caffe_trains(tmp_path: Path) -> None:
    done = helpers.script(ROOT / "examples/06_from_caffe/train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert errors[-1] < 0.1 * errors[0]

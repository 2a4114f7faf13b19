"""round_ste: 1 above a half, else 0; and a gradient that comes through untouched."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opjit import Op, catalog
from tests.tensors import COMPILES, DEVICES, FLOATING, Seen

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def round_ste() -> Op:
    return catalog.find("round_ste")


def assert_rounded(op: Op, x: torch.Tensor) -> None:
    got = op(x)
    assert torch.equal(got, (x > 0.5).to(x.dtype))
    assert not got.signbit().any()
    assert (got.dtype, got.device, got.stride()) == (x.dtype, x.device, torch.empty_like(x).stride())


@pytest.mark.parametrize("device", DEVICES)
def test_samples_equal_a_comparison_in_torch(round_ste: Op, device: str) -> None:
    count = 0
    for args, _ in round_ste.sample(device):
        assert_rounded(round_ste, *args)
        count += 1
    assert count > 40


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_every_length_alignment_and_stride(round_ste: Op, dtype: torch.dtype, device: str) -> None:
    x = torch.rand(2200, generator=torch.Generator().manual_seed(1)).to(device).to(dtype)
    for start in (0, 1, 3, 8):
        for n in (*range(40), 63, 64, 65, 127, 128, 129, 511, 512, 513, 2049):
            assert_rounded(round_ste, x[start:start + n])
    y = torch.rand(66 * 70 * 34, generator=torch.Generator().manual_seed(2)).to(device).to(dtype).reshape(66, 70, 34)
    for view in (y, y.permute(2, 0, 1), y[1::3, ::2, 3:31], y[0].expand(5, 70, 34), y[:, 3], y[0, 0, 0].expand(100), y[:, :1].expand_as(y)):
        assert_rounded(round_ste, view)


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


@COMPILES
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_is_one_graph_with_gradients(round_ste: Op, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: round_ste.overload(x.sigmoid()) * x, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 8, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        got, expected = compiled(x), (x.sigmoid() > 0.5) * x
        torch.testing.assert_close(got, expected)
        (grad,) = torch.autograd.grad(got.sum(), x)
        sigmoid = x.sigmoid()
        torch.testing.assert_close(grad, (sigmoid > 0.5).float() + x * sigmoid * (1 - sigmoid))


def test_exported_it_keeps_its_name(round_ste: Op) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = round_ste.overload(x)
            return result

    program = torch.export.export(Model(), (torch.rand(3, 4),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    assert any(node.target == round_ste.overload for node in program.graph.nodes)
    x = torch.rand(9, 4)
    torch.testing.assert_close(program.module()(x), (x > 0.5).float())


def test_the_example_for_caffe_trains(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(ROOT / "examples/from_caffe/train.py")], capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert errors[-1] < 0.1 * errors[0]

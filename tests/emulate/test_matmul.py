"""The bundled matmul in the emulation: each of its three ways gives the reference's numbers, without a finding."""

import pytest

from tests.helpers import ROOT, fresh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CODE = """
    import torch, opjit
    opjit.add_path({folder!r})
    matmul = opjit.get("opjit::matmul")

    def numbers(*shape):
        steps = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
        return torch.sin(steps**1.5).reshape(shape)

    def differs(rows, depth, columns, epilogue, dtype, by_rows, step):
        x = numbers(rows, depth * step).to(dtype)[:, ::step]
        w = (numbers(columns, depth) / depth**0.5).to(dtype)
        w = w.t().contiguous() if by_rows else w.t()
        bias = numbers(columns).to(dtype)
        halves = 2 if epilogue == "silu_multiply" else 1
        residual = numbers(rows, columns // halves).to(dtype)
        z = x.float() @ w.float() + bias.float()
        if halves == 2:
            gate, up = z.chunk(2, dim=1)
            z = torch.nn.functional.silu(gate) * up
        want = (z + residual.float()).to(dtype).float()
        got = matmul(x, w, bias, residual, epilogue=epilogue).float()
        return ((got - want).abs() / (1 + want.abs())).max().item()

    for shape in {shapes}:
        for dtype in (torch.bfloat16, torch.float16):
            for by_rows in (False, True):
                worst = max(
                    differs(*shape, epilogue, dtype, by_rows, {step})
                    for epilogue in ("none", "silu_multiply")
                )
                assert worst < 8e-3, (shape, dtype, by_rows, worst)
    print("right")
"""


@pytest.mark.parametrize(
    ("shapes", "step"),
    [
        pytest.param([(1, 64, 64), (16, 520, 136), (64, 256, 128), (100, 64, 72)], 1, id="narrow"),
        pytest.param([(300, 320, 512), (257, 72, 520)], 1, id="wide"),
        pytest.param([(130, 40, 72), (5, 17, 6)], 2, id="sync"),
    ],
)
def test_each_way_is_right(shapes: list[tuple[int, int, int]], step: int, no_gpu: None) -> None:
    code = CODE.format(folder=str(ROOT / "kernels_c/matmul"), shapes=shapes, step=step)
    done = fresh(code, {"OPJIT_EMULATE": "1"})
    assert done.stdout == "right\n", done

"""Ops on DTensors of two processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, environment

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import opjit
{before}
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
{after}
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
x, y = torch.arange(24.0).reshape(4, 6), torch.arange(1.0, 7.0)
share = lambda tensor, *places: distribute_tensor(tensor, mesh, places)
def check(got, expected, *places):
    assert got.placements == places, got.placements
    torch.testing.assert_close(got.full_tensor(), expected)
{body}
dist.destroy_process_group()
print("done")
"""
SCALED = """
scaled = opjit.inline("scaled(Tensor x, float a, Tensor? bias=None) -> Tensor", like="x", elementwise={elementwise}, c='''
opjit_status scaled_cpu(const opjit_tensor *x, double a, const opjit_tensor *bias, opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[opjit_offset(out, i)] = (float)a * ((const float *)x->data)[opjit_offset(x, i)];
    return OPJIT_OK;
}}''')
"""


def run(tmp_path: Path, body: str, before: str = "", after: str = "") -> list[str]:
    """Run a program in two processes. Returns what they wrote to stderr, if one failed."""
    text = PROGRAM.format(body=body, before=before, after=after)
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*words, str(rank)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment({"OMP_NUM_THREADS": "1"}),
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:  # one that waits for another that died
            rank.kill()
    return [
        errors or f"ended with {rank.returncode}"
        for rank, (output, errors) in zip(ranks, ended, strict=True)
        if not output.endswith("done\n")
    ]


def test_the_sum_of_shards_is_partial(tmp_path: Path) -> None:
    assert (
        run(
            tmp_path,
            """
allreduce = opjit.get("allreduce", "cpu")
for dim in (0, 1):
    check(allreduce(share(x, Shard(dim))), x.sum(), Partial())
check(allreduce(share(x, Replicate())), x.sum(), Replicate())
check(allreduce(share(x, Shard(0)), dtype=torch.float64), x.sum(dtype=torch.float64), Partial())
check(allreduce(share(x, Shard(0)), dtype=torch.bool), x.sum(dtype=torch.bool), Replicate())
check(allreduce(share(torch.arange(3), Shard(0))), torch.tensor(3), Partial())  # the last shard is smaller
leaf = share(x, Shard(0)).requires_grad_()
(allreduce(leaf * leaf)).backward()
check(leaf.grad, 2 * x, Shard(0))
""",
        )
        == []
    )


def test_an_elementwise_op_stays_sharded(tmp_path: Path) -> None:
    assert (
        run(
            tmp_path,
            """
add = opjit.get("add_custom", "cpu")
check(add(share(x, Shard(0)), share(x, Shard(0))), x + x, Shard(0))
check(add(share(x, Shard(0)), share(y, Replicate())), x + y, Shard(0))
check(add(share(x, Shard(1)), share(y, Shard(0))), x + y, Shard(1))
check(add(share(x, Shard(1)), share(x[:, :1].clone(), Replicate())), x + x[:, :1], Shard(1))
check(add(share(x, Replicate()), share(x, Replicate())), x + x, Replicate())
a, b = share(x, Shard(0)).requires_grad_(), share(y, Replicate()).requires_grad_()
add(a * a, b).sum().backward()
check(a.grad, 2 * x, Shard(0))
torch.testing.assert_close(b.grad.full_tensor(), torch.full((6,), 4.0))
compiled = torch.compile(add, backend="aot_eager", fullgraph=True)
check(compiled(share(x, Shard(0)), share(x, Shard(0))), x + x, Shard(0))
""",
        )
        == []
    )


def test_a_matrix_product_stays_sharded(tmp_path: Path) -> None:
    assert (
        run(
            tmp_path,
            """
matmul = opjit.get("matmul", "cpu")
draw = torch.Generator().manual_seed(0)
a, w, bias, rest = (
    torch.randn(shape, generator=draw).round().bfloat16() for shape in ((4, 6), (6, 8), (8,), (4, 8))
)
whole = Replicate()
right = matmul(a, w, bias, rest, epilogue="relu")
for of_a, of_w, of_bias, of_rest, of_out in (
    (whole, whole, whole, whole, whole),
    (Shard(0), whole, whole, Shard(0), Shard(0)),
    (whole, Shard(1), Shard(0), Shard(1), Shard(1)),
):
    shares = share(a, of_a), share(w, of_w), share(bias, of_bias), share(rest, of_rest)
    check(matmul(*shares, epilogue="relu"), right, of_out)
check(matmul(share(a, Shard(1)), share(w, Shard(0))), a @ w, Partial())
gated = matmul(a, w, bias, epilogue="silu_multiply")
check(matmul(share(a, Shard(0)), share(w, whole), share(bias, whole), epilogue="silu_multiply"), gated, Shard(0))
found = matmul(share(a, whole), share(w, Shard(1)), share(bias, Shard(0)), epilogue="silu_multiply")
check(found, gated, whole)  # each part of the result needs two parts of w
""",
        )
        == []
    )


@pytest.mark.parametrize("declared", ["before", "after"])
def test_a_declared_rule_serves_whenever_dtensor_is_imported(tmp_path: Path, declared: str) -> None:
    rule = """
@scaled.sharding
def sharding(x, a, bias=None):
    from torch.distributed.tensor import Replicate, Shard
    return [([Replicate()], [Replicate(), None, None]), ([Shard(0)], [Shard(0), None, None])]
"""
    assert (
        run(
            tmp_path,
            """
check(scaled(share(x, Shard(0)), 2.0), 2 * x, Shard(0))
check(torch.ops.inline.scaled(share(x, Shard(1)), 3.0), 3 * x, Replicate())  # the rule has no sharding for the second dimension
""",
            **{declared: SCALED.format(elementwise=False) + rule},
        )
        == []
    )


def test_an_elementwise_op_may_have_scalars_and_leave_tensors_out(tmp_path: Path) -> None:
    assert (
        run(
            tmp_path,
            "check(scaled(share(x, Shard(1)), 2.0), 2 * x, Shard(1))",
            before=SCALED.format(elementwise=True),
        )
        == []
    )


def test_a_reload_takes_a_rule_back(tmp_path: Path) -> None:
    """DTensor would go on with the former rule, and sum each shard alone."""
    errors = run(
        tmp_path,
        SCALED.format(elementwise=True)
        + "scaled(share(x, Shard(0)), 2.0)\n"
        + SCALED.format(elementwise=False)
        + "scaled(share(x, Shard(0)), 2.0)",
    )
    assert len(errors) == 2
    assert "inline.scaled.default does not have a sharding strategy registered" in errors[0]

"""The check "rejects": the calls that a reference rejects are made, and the op must raise one line."""

from pathlib import Path
from typing import Any

import pytest
import torch

from opjit import Op, testing
from opjit.testing.checks import Line
from tests.helpers import MakeOp, command
from tests.testing.mistakes import Mistake

[REJECTS] = [check for check in testing.CHECKS if check.name == "rejects"]
SCATTER = """
opjit_status scattered_cpu(const opjit_tensor *x, const opjit_tensor *index, int64_t rows, opjit_tensor *out)
{{
    {check}
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(rows), x->dtype, x));
    memset(out->data, 0, (size_t)rows * sizeof(float));
    for (int64_t i = 0; i < x->numel; i++) {{
        const int64_t row = ((const int64_t *)index->data)[opjit_offset(index, i)];
        {bounds}
        ((float *)out->data)[row] += ((const float *)x->data)[opjit_offset(x, i)];
    }}
    return OPJIT_OK;
}}
"""
DTYPES = """
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && index->dtype == OPJIT_INT64, "expected float32 and int64");
"""
CHECK = f"""{DTYPES}
    OPJIT_CHECK(x->dim == 1 && index->dim == 1 && x->numel == index->numel, "expected one size");
"""
ROWS = 'OPJIT_CHECK(rows >= 0, "rows is negative");'
BOUNDS = 'OPJIT_CHECK(row >= 0 && row < rows, "an index is out of range");'


def scattered(make_op: MakeOp, check: str = CHECK + ROWS, bounds: str = BOUNDS) -> Op:
    op = make_op(
        "scattered(Tensor x, Tensor index, int rows) -> Tensor",
        SCATTER.format(check=check, bounds=bounds),
        fake=lambda x, index, rows: x.new_empty(rows),
    )

    @op.reference
    def reference(x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
        assert x.dim() == 1
        return x.new_zeros(rows).index_add(0, index, x)

    @op.samples
    def samples(device: str) -> Any:
        yield torch.ones(5, device=device), torch.tensor([0, 2, 1, 2, 0], device=device), 3

    return op


def line_of(op: Op) -> Line:
    [line] = testing.results(op, "cpu", [REJECTS])
    return line


def test_an_op_that_checks_its_arguments_passes(make_op: MakeOp) -> None:
    line = line_of(scattered(make_op))
    assert line.status == "ok", line
    assert line.note.startswith("7 rejected with a one-line error; 7 calls")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"bounds": "if (row < 0 || row > rows) continue;"},
            r"with -1 in tensor 1) the op must raise an error, because its reference raises IndexError",
        ),
        (
            {"bounds": 'OPJIT_CHECK(row >= 0, "negative"); if (row >= rows) continue;'},
            "with 5 in tensor 1) the op must raise an error",
        ),
        (
            {"bounds": 'OPJIT_CHECK(row >= 0 && row < rows, "out of\\nrange");'},
            "must raise a one-line error that names it",
        ),
        (
            {"check": CHECK + "if (rows < 0) rows = 3;"},
            "with -1000 in place of 3) the op must raise an error",
        ),
        (
            {"check": DTYPES + ROWS},
            "with tensor 0 without dimensions) the op must raise an error",
        ),
    ],
    ids=["index skipped", "one too large", "two lines", "number", "no dimensions"],
)
def test_an_op_that_accepts_what_its_reference_rejects_fails(
    make_op: MakeOp, wrong: dict[str, str], told: str
) -> None:
    line = line_of(scattered(make_op, **wrong))
    assert line.status == "failed", line
    assert told in line.note


def test_an_op_whose_reference_accepts_everything_is_skipped(make_op: MakeOp) -> None:
    op = scattered(make_op)
    op.reference(lambda x, index, rows: x)
    line = line_of(op)
    assert line.status == "skipped"
    assert "accepts every index, number and tensor" in line.note


def test_a_write_without_a_bounds_check_is_found_at_its_line_by_the_sanitizers(
    tmp_path: Path,
) -> None:
    folder = Mistake("unchecked", "").write(tmp_path / "unchecked")
    text = SCATTER.format(check=CHECK + ROWS, bounds="").replace("scattered_cpu", "unchecked_cpu")
    (folder / "unchecked.c").write_text('#include "opjit.h"\n' + text)
    (folder / "op.py").write_text(
        """
import torch
import opjit

@opjit.op("mistakes::unchecked(Tensor x, Tensor index, int rows) -> Tensor")
def unchecked(x, index, rows):
    return x.new_empty(rows)

unchecked.reference(lambda x, index, rows: x.new_zeros(rows).index_add(0, index, x))

@unchecked.samples
def samples(device):
    yield torch.ones(5, device=device), torch.tensor([0, 2, 1, 2, 0], device=device), 3
"""
    )
    done = command("test", folder, "--device", "cpu", "--only", "results", "--only", "rejects")
    assert "ok       results" in done.stdout
    if "lacks a library for -fsanitize" not in done.stdout:
        assert "unchecked.c:15: heap-buffer-overflow, READ of size 4" in done.stdout, done.stdout
    assert done.returncode == 1

"""`opjit bench` measures every op's workloads, holds results and errors against float64, and stops where an op is wrong."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import opjit
from opjit import Op
from opjit.author import bench
from opjit.cli import main
from opjit.measure.plan import Measurement
from opjit.measure.timing import measure
from opjit.measure.units import format_rate
from tests.helpers import MakeOp, elementwise, refused


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench, "measure", lambda plan: measure(replace(plan, rounds=2, seconds=1e-4))
    )


def measured(file: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """What the command prints, and the numbers it writes."""
    done = CliRunner().invoke(
        main,
        ["bench", *arguments, "--device", "cpu", "--json", "--output", str(file)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    return done.output, json.loads(file.read_text())


@pytest.mark.usefixtures("parts")
def test_several_ops_and_several_results_are_measured(tmp_path: Path) -> None:
    printed, lines = measured(tmp_path / "lines.json", "optest::parts", "optest::joined")
    assert [(line["op"], line["label"]) for line in lines] == [
        ("optest::parts", "float32 2^6"),
        ("optest::parts", "float32 2^10"),
        ("optest::joined", "float32 2^10"),
    ]
    for line in lines:
        assert line["opjit"] > 0
        assert line["reference"] > 0
        assert (line["host"], line["bound"], line["clock"]) == (None, None, None), "a GPU's columns"
        assert line["possible"]
        assert line["quartiles"][0] <= line["opjit"] <= line["quartiles"][1]
        assert line["error"] == line["reference_error"] == 0, "what these ops compute is exact"
    rows = [row.split() for row in printed.splitlines() if row.startswith("float32 2^")]
    assert re.search(r"^faster in \d of 2, ", printed, re.MULTILINE)
    assert lines[0]["bytes"] > 0
    assert rows[0][-4:-2] == format_rate(lines[0]["bytes"] / lines[0]["opjit"], "B").split()
    assert rows[2][-3] == "-", "without bytes there is no bandwidth"
    assert max(map(len, printed.splitlines())) <= 80


def test_two_lines_sum_up_an_op_on_a_device() -> None:
    measured: list[Any] = [
        SimpleNamespace(label=label, ratio=ratio)
        for label, ratio in (("small", 1.5), ("middle", 1.04), ("large", 0.5))
    ]
    assert bench.summary(measured) == (
        "faster in 1 of 3, equal in 1, slower in 1\n"
        "speed: median 0.96x, best 2.00x (large), worst 0.67x (small)"
    )


def _elementwise(
    make_op: MakeOp,
    expression: str,
    x: torch.Tensor,
    reference: Callable[[torch.Tensor], torch.Tensor],
) -> Op:
    """An op of float32 and one workload."""
    op = make_op("made(Tensor x) -> Tensor", elementwise("made", expression), fake=torch.empty_like)
    op.reference(reference)
    op.workloads(lambda device: [opjit.Workload("the only one", (x,), {}, 2 * x.nbytes)])
    return op


def test_operations_a_noisy_run_and_their_numbers_are_shown(
    make_op: MakeOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = _elementwise(make_op, "2 * from[i]", torch.ones(1000), lambda x: 2 * x)
    op.workloads(
        lambda device: [opjit.Workload("counted", (torch.ones(1000),), {}, 8000, flops=1000)]
    )
    monkeypatch.setattr(os, "getloadavg", lambda: (9999.0, 0.0, 0.0))
    times = {"opjit": (1e-6, 2e-6, 3e-6), "torch": (1e-6, 1e-6, 1e-6)}
    monkeypatch.setattr(
        bench,
        "measure",
        lambda plan: {
            side: Measurement(times[side], None, "clock", 1, 1, False, plan.bytes, plan.flops)
            for side in plan.sides
        },
    )
    printed, [line] = measured(tmp_path / "lines.json", op.qualified)
    assert " 0.500 GFLOP/s" in printed
    assert "noisy: the rounds of 1 of 1 workloads spread by more than 10%" in printed
    assert "the machine is busy: load 9999.0 on " in printed
    assert (line["opjit"], line["reference"], line["spread"], line["flops"], line["against"]) == (
        2e-6,
        1e-6,
        0.5,
        1000,
        "torch",
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # of torch itself
@pytest.mark.parametrize(
    ("against", "name"),
    [
        ("aten::neg", "neg"),
        ("torch:neg", "neg"),
        pytest.param("torch.compile", "compile", marks=pytest.mark.slow),
    ],
)
def test_another_side_is_measured_when_asked(
    make_op: MakeOp, tmp_path: Path, against: str, name: str
) -> None:
    op = _elementwise(make_op, "-from[i]", torch.ones(100), lambda x: -x)
    printed, [line] = measured(tmp_path / "lines.json", op.qualified, "--against", against)
    assert line["against"] == name
    assert re.search(f"opjit +{name} +speed", printed)


@pytest.mark.parametrize(
    "against", ["nothing", "no_such_module:name", "torch:no_such_name", "aten::no_such_op"]
)
def test_a_side_that_is_not_there_is_refused(make_op: MakeOp, against: str) -> None:
    op = _elementwise(make_op, "-from[i]", torch.ones(100), lambda x: -x)
    told = refused("bench", op.qualified, "--against", against, code=2)
    assert f"(module:name), got {against!r}" in told


def test_a_side_with_other_results_is_refused(make_op: MakeOp) -> None:
    op = _elementwise(make_op, "-from[i]", torch.ones(100), lambda x: -x)
    with pytest.raises(AssertionError, match="exp is wrong on the only one"):
        CliRunner().invoke(
            main,
            ["bench", op.qualified, "--device", "cpu", "--against", "torch:exp"],
            catch_exceptions=False,
        )


def test_errors_are_against_float64(make_op: MakeOp, tmp_path: Path) -> None:
    """Ours is off by a thousandth, which the validation lets pass, and torch's by the rounding of float32."""
    op = _elementwise(make_op, "1.001f * from[i] / 3", torch.arange(100.0), lambda x: x / 3)
    [line] = measured(tmp_path / "lines.json", op.qualified)[1]
    assert line["error"] == pytest.approx(1e-3, rel=1e-3)
    assert 0 < line["reference_error"] <= 2**-24


@pytest.mark.parametrize(
    ("schema", "c", "reference"),
    [
        (
            "made(Tensor(a!) x) -> ()",
            "opjit_tensor *x) { ((float *)x->data)[0] += 1;",
            lambda x: x[:1].add_(1) and None,
        ),
        (
            "made(Tensor x) -> int",
            "const opjit_tensor *x, int64_t *out) { *out = x->numel + 1;",
            lambda x: x.numel() + 1,
        ),
        (
            "made(Tensor x) -> Tensor",
            "const opjit_tensor *x, opjit_tensor *out) { int64_t size = 1; OPJIT_TRY(opjit_empty(out, 1, &size, "
            "OPJIT_INT32, x)); *(int32_t *)out->data = 1;",
            lambda x: x.new_ones(1, dtype=torch.int32),
        ),
    ],
)
@pytest.mark.parametrize("wrong", [False, True])
def test_an_op_without_a_float_result_is_measured_and_one_that_is_wrong_is_not(
    make_op: MakeOp,
    tmp_path: Path,
    schema: str,
    c: str,
    reference: Callable[[torch.Tensor], Any],
    wrong: bool,
) -> None:
    op = make_op(
        schema, f"opjit_status made_cpu({c.replace('1;', '9;') if wrong else c} return OPJIT_OK; }}"
    )
    op.reference(reference)
    op.workloads(
        lambda device: iter([opjit.Workload("the only one", (torch.arange(4.0),), {}, 16)])
    )
    if wrong:
        with pytest.raises(AssertionError, match="is wrong on the only one"):
            measured(tmp_path / "lines.json", op.qualified)
        assert (tmp_path / "lines.json").read_text() == ""
    else:
        [line] = measured(tmp_path / "lines.json", op.qualified)[1]
        assert line["error"] == line["reference_error"] == 0


@pytest.mark.usefixtures("parts")
def test_only_measures_what_contains_the_text_and_a_file_that_cannot_be_written_is_refused_before(
    tmp_path: Path,
) -> None:
    assert [
        line["label"]
        for line in measured(tmp_path / "lines.json", "optest::parts", "--only", "2^10")[1]
    ] == ["float32 2^10"]
    none = CliRunner().invoke(
        main, ["bench", "optest::parts", "--device", "cpu", "--only", "no such workload"]
    )
    assert none.exit_code == 2
    assert "no workload's label contains 'no such workload'" in none.output
    lost = CliRunner().invoke(
        main, ["bench", "optest::parts", "--json", "--output", str(tmp_path / "none" / "out.json")]
    )
    assert lost.exit_code == 2
    assert "No such file or directory" in lost.output

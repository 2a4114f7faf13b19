"""Definitions and solutions of flashinfer-bench, which a script of the course turns into tasks and candidates."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, ended, example
from tests.judge.test_judge import NOT_WRONG, judged

REFERENCE = """
import torch

@torch.no_grad()
def run(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""
RMS_NORM = {
    "name": "rms_norm_h64",
    "op_type": "rmsnorm",
    "axes": {"rows": {"type": "var"}, "h": {"type": "const", "value": 64}},
    "inputs": {
        "x": {"shape": ["rows", "h"], "dtype": "float32"},
        "weight": {"shape": ["h"], "dtype": "float32"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["rows", "h"], "dtype": "float32"}},
    "reference": REFERENCE,
}
NUMPY = """
import numpy

def kernel(x, weight, eps{out}):
    y = x.numpy()
    y = y / numpy.sqrt((y * y).mean(-1, keepdims=True) + eps) * weight.numpy() * FACTOR
"""
RETURNS = NUMPY.format(out="") + "    import torch\n    return torch.from_numpy(y)\n"
WRITES = NUMPY.format(out=", out") + "    out.numpy()[...] = y\n"
PATCHES = "import torch\ntorch.cuda.Event.elapsed_time = lambda *events: 0.0\n"


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    """A dataset with a definition and two workloads."""
    place = tmp_path / "definitions" / "rmsnorm" / "rms_norm_h64.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(RMS_NORM))
    workloads = tmp_path / "workloads" / "rmsnorm" / "rms_norm_h64.jsonl"
    workloads.parent.mkdir(parents=True)
    eps = {"eps": {"type": "scalar", "value": 1e-6}, "x": {"type": "random"}}
    lines = [
        json.dumps(
            {
                "definition": "rms_norm_h64",
                "workload": {"uuid": str(rows), "axes": {"rows": rows}, "inputs": eps},
            }
        )
        for rows in (3, 200)
    ]
    workloads.write_text("\n".join(lines) + "\n")
    return place


def solution(text: str, **spec: Any) -> str:
    made = {"language": "python", "entry_point": "main.py::kernel", **spec}
    sources = [{"path": "main.py", "content": text}]
    return json.dumps(
        {"name": "mine", "definition": "rms_norm_h64", "spec": made, "sources": sources}
    )


def test_a_definition_and_its_solutions_are_judged(definition: Path, tmp_path: Path) -> None:
    script = "12_judge/flashinfer_bench.py"
    (tmp_path / "task.py").write_text(example(script, definition))
    by_torch = REFERENCE.replace("def run", "def kernel")
    solutions = {
        "returns": solution(RETURNS.replace("FACTOR", "1"), destination_passing_style=False),
        "writes": solution(WRITES.replace("FACTOR", "1")),
        "wrong": solution(WRITES.replace("FACTOR", "1.5")),
        "torch": solution(by_torch, destination_passing_style=False),
        "patched": solution(PATCHES + WRITES.replace("FACTOR", "1")),
    }
    texts = {}
    for name, text in solutions.items():
        (tmp_path / f"{name}.json").write_text(text)
        texts[name] = example(script, definition, tmp_path / f"{name}.json")
    verdicts = judged(str(tmp_path / "task.py"), [*texts.items()])
    assert verdicts["returns"].verdict in NOT_WRONG, verdicts
    assert verdicts["writes"].verdict in NOT_WRONG, verdicts
    assert verdicts["wrong"].verdict == "wrong", verdicts
    assert verdicts["torch"].verdict == "cheat", verdicts
    assert verdicts["patched"].verdict == "cheat", verdicts
    assert "replaces functions of other modules" in verdicts["patched"].message


def test_a_solution_in_cuda_is_refused_with_a_way_out(definition: Path, tmp_path: Path) -> None:
    made = json.loads(solution("", entry_point="main.cu::run", language="cuda"))
    made["sources"] = [{"path": "main.cu", "content": ""}]
    (tmp_path / "solution.json").write_text(json.dumps(made))
    script = str(ROOT / "examples/12_judge/flashinfer_bench.py")
    words = [script, str(definition), str(tmp_path / "solution.json")]
    done = ended(
        f"import runpy, sys\nsys.argv = {words!r}\nrunpy.run_path({script!r}, run_name='__main__')"
    )
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "expected one file of Python in mine, got main.cu; write CUDA as an op",
    )

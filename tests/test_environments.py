"""Ops and programs build the fast way in environments that users have, and tests/environments.py finds those where they do not."""

import re
from pathlib import Path

import pytest

from tests.environments import (
    BUILDS,
    ENVIRONMENTS,
    Environment,
    Missing,
    Run,
    Setting,
    Step,
    plain,
    problem_of,
    row,
    run,
)
from tests.helpers import ROOT, program


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, each in ENVIRONMENTS.items() if each.release is None]
)
def test_an_op_and_programs_build_the_fast_way_and_run(name: str) -> None:
    try:
        done = run(ENVIRONMENTS[name], steps=tuple(BUILDS))
    except Missing as reason:
        pytest.skip(str(reason))
    assert done.problems == []


@pytest.mark.slow
def test_an_environment_whose_compiler_does_not_work_has_a_problem_and_one_whose_process_ends_has(
    tmp_path: Path,
) -> None:
    broken = program(tmp_path / "broken", "#!/bin/sh\nexit 1\n")
    compiler = Environment("broken", lambda folder: Setting({"CC": str(broken)}))
    [problem] = run(compiler, steps=["C op"]).problems
    assert problem.startswith(f"C op: ToolMissing: {broken} is not a working gcc or clang")
    ends = Environment("ends", lambda folder: Setting(before=("sh", "-c", "exit 3")))
    [problem] = run(ends, steps=["C op"]).problems
    assert problem.startswith("exit code 3")


@pytest.mark.parametrize(
    ("name", "way", "is_fast"),
    [
        ("C op", "gcc version 12.2.0", True),
        ("C op", "clang version 19.1.7", False),
        ("C++ program", "light headers", True),
        ("C++ program", "torch's own headers: error", False),
        ("CUDA program", "light headers; NVRTC 13.0 e208c558329b9338", True),
        ("CUDA program", "light headers; its CUDA code is emulated on the CPU", True),
        ("CUDA program", "light headers; nvcc 13.0, as NVRTC refused it", False),
        ("CUDA program", "light headers", False),
        ("CUDA program", "torch's own headers: error; NVRTC 13.0 e208c558329b9338", False),
    ],
)
def test_a_step_that_was_not_built_the_fast_way_by_its_compiler_has_a_problem(
    name: str, way: str, is_fast: bool
) -> None:
    environment = Environment("gcc", plain, "gcc version 12")
    assert problem_of(Step(name, way, "", 1.0), environment) == (
        "" if is_fast else f"built with {way}"
    )
    assert problem_of(Step(name, way, "no", 1.0), environment) == "no"


def test_a_row_has_the_way_of_the_builds() -> None:
    steps = [
        Step("demo", "ran", "", 50.0),
        Step("C op", "gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)", "", 1.0),
        Step("CUDA program", "light headers; NVRTC 13.0 e208c558329b9338", "", 29.0),
    ]
    done = Run(steps, [])
    assert done.cpu_seconds == 30.0
    cells = row(Environment("umask 002", plain), done).split(" | ")
    assert cells[0] == "| umask 002"
    assert cells[2:] == ["gcc 12.2; light headers; NVRTC 13.0", "right |"]


def test_a_row_of_contributing_is_an_environment_which_has_one_row() -> None:
    page = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
    titles = re.findall(r"^\| (.+?) \| \d{4}-\d\d-\d\d \|", page, re.MULTILINE)
    assert titles
    assert len(titles) == len({*titles} & {each.title for each in ENVIRONMENTS.values()})

"""A run leaves out what takes long and says so; a whole run that executes too little fails, and one command measures what is slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiers
from tests.helpers import ROOT

CONFTEST = """
import os
from pathlib import Path
import pytest
from tests import tiers
tiers.DURATIONS, tiers.FLOORS, tiers.SLOW = Path("durations.txt"), Path("floors.json"), 0.1
def pytest_addoption(parser): tiers.add_options(parser)
def pytest_configure(config):
    config.chosen = tiers.Tiers(config, {"gpu": False, "nvcc": True}, "HIDDEN" in os.environ)
    config.pluginmanager.register(config.chosen)
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items): config.chosen.select(items)
"""
TESTS = """
import pytest
@pytest.fixture(scope="module")
def costly():
    sum(range(20_000_000))
def test_quick(): pass
def test_of_a_file(): pass
def test_busy(): sum(range(50_000_000))
@pytest.mark.parametrize("case", [1, 2])
def test_busy_cases(case): sum(range(50_000_000))
def test_that_shares_its_cost(costly): pass
@pytest.mark.corpus
def test_marked(): pass
@pytest.mark.stress
def test_for_hours(): pass
@pytest.mark.matrix(4)
@pytest.mark.parametrize("case", range(40))
def test_table(case): pass
"""
INI = "[pytest]\nmarkers =\n gpu\n nvcc\n slow\n corpus\n stress\n matrix\n"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def project(tmp_path: Path) -> Run:
    """``project(*arguments, file=text)``: the status and the text of a run of pytest on tests of its own."""
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(INI, encoding="utf-8")
    (tmp_path / "test_one.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "durations.txt").write_text("# seconds\n9.9 test_of_a_file\n9.9 test_long_gone\n", encoding="utf-8")
    (tmp_path / "floors.json").write_text("{}", encoding="utf-8")

    def run(*arguments: str, **changed: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **changed}, capture_output=True, text=True,
                              check=False)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_run_leaves_out_what_is_slow_and_says_how_to_run_it(project: Run, workers: tuple[str, ...]) -> None:
    status, text = project(*workers, "-k", "not busy")
    assert status == 0
    *_, slow, stress, last = text.splitlines()
    assert slow.endswith("tests of the tier slow; run them with --tier slow or --tier all")
    assert stress == "Left out: 1 tests of the tier stress; run them with -m stress"
    left, ran = int(slow.split()[2]), int(last.split()[0])
    assert left + ran == 44
    assert 22 <= left <= 42, "most of the 40 cases of the matrix, and two tests"


def test_each_way_to_choose_chooses(project: Run) -> None:
    def passed(*arguments: str) -> int:
        return int(project(*arguments)[1].splitlines()[-1].split()[0])

    assert passed("-m", "stress") == passed("test_one.py::test_of_a_file") == passed("-m", "corpus") == 1
    fast = passed("-k", "table")
    for tier, all_of_it in (("slow", 40 - fast), ("fast", fast)):
        parts = [passed("-k", "table", "--tier", tier, "--part", f"{number}/2") for number in (7, 8)]
        assert sum(parts) == all_of_it
        assert max(parts) - min(parts) <= 1, "all cost the same"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_run_that_is_measured_writes_what_is_slow_and_how_much_must_run(project: Run, tmp_path: Path, workers: tuple[str, ...]) -> None:
    status, text = project(*workers, "--tier", "all", "--measure")
    assert status == 0, text
    names = [line.split()[1] for line in (tmp_path / "durations.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert {"test_busy", "test_busy_cases"} <= {*names}
    assert not {"test_quick", "test_of_a_file", "test_long_gone"} & {*names}
    floors = json.loads((tmp_path / "floors.json").read_text(encoding="utf-8"))
    assert sum(floors.values()) in (44, 45), "95 of a hundred"
    assert project(*workers)[0] == 0
    (tmp_path / "floors.json").write_text(json.dumps({**floors, "fast": floors["fast"] + 10, "fast gpu": 99}), encoding="utf-8")
    status, text = project(*workers)
    assert status == 1
    assert "of 'fast' were executed, and the floor in tests/floors.json is" in text
    assert "1 failed" in text.splitlines()[-1]


def test_a_room_s_tests_fit_its_budget_and_each_function_keeps_its_cheapest_case_while_that_can_be() -> None:
    cases = {f"tests/store/test_a.py::test_cases[{number}]": 1.0 + number / 100 for number in range(50)}
    others = {f"tests/store/test_a.py::test_{number}": 1.5 for number in range(10)} | {"tests/store/test_a.py::test_long": 2.5}
    found = tiers.slow_of({**cases, **others, "tests/test_b.py::test_at_the_top": 1.9, "tests/cli/test_c.py::test_alone": 1.9}, {})
    assert found.keys() == {"test_long", *(f"test_cases[{number}]" for number in range(22, 50))}
    assert 40 - 1.3 < sum(cost for name, cost in {**cases, **others}.items() if tiers.name_of(name) not in found) <= 40


def test_a_whole_run_that_skips_a_file_or_the_gpu_fails(project: Run, tmp_path: Path) -> None:
    skipping = 'import pytest\n@pytest.mark.{}\ndef test_it(): pytest.skip("no reason")\n'
    (tmp_path / "test_gpu.py").write_text(skipping.format("gpu"), encoding="utf-8")
    status, text = project("-k", "quick or it")
    assert status == 0
    assert "Not run: 1 tests that need a GPU; python -m tests.gpu" in text
    (tmp_path / "test_one.py").write_text("def test_quick(): pass\n", encoding="utf-8")
    assert project()[0] == 0
    status, text = project(HIDDEN="1")
    assert status == 1
    assert "torch sees none" in text
    (tmp_path / "test_nvcc.py").write_text(skipping.format("nvcc"), encoding="utf-8")
    status, text = project()
    assert status == 1
    assert "test_nvcc.py was skipped whole" in text
    assert "1 failed, 1 passed, 2 skipped" in text.splitlines()[-1]

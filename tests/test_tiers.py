"""A run leaves out what takes long and says so, and a whole run that executes too little fails."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT

CONFTEST = """
import os
from pathlib import Path
import pytest
from tests import tiers
tiers.DURATIONS, tiers.FLOORS = Path("durations.txt"), Path("floors.json")
def pytest_addoption(parser): tiers.add_options(parser)
def pytest_configure(config):
    config.chosen = tiers.Tiers(config, {"gpu": False, "nvcc": True}, "HIDDEN" in os.environ)
    config.pluginmanager.register(config.chosen)
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items): config.chosen.select(items)
"""
TESTS = """
import pytest
def test_quick(): pass
def test_listed(): pass
@pytest.mark.parametrize("case", range(8))
def test_listed_cases(case): pass
@pytest.mark.slow
def test_marked(): pass
@pytest.mark.corpus
def test_program(): pass
@pytest.mark.stress
def test_for_hours(): pass
"""
INI = "[pytest]\nmarkers =\n gpu\n nvcc\n slow\n corpus\n stress\n"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def project(tmp_path: Path) -> Run:
    """``project(*arguments, VARIABLE=value)``: the status and the text of a run of pytest on tests of its own."""
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(INI, encoding="utf-8")
    (tmp_path / "test_one.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "durations.txt").write_text(
        "# seconds\n9.9 test_listed\n3.3 test_listed_cases\n", encoding="utf-8"
    )
    (tmp_path / "floors.json").write_text("{}", encoding="utf-8")

    def run(*arguments: str, **changed: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **changed},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_run_leaves_out_what_is_slow_and_says_how_to_run_it(
    project: Run, workers: tuple[str, ...]
) -> None:
    status, text = project(*workers)
    assert status == 0
    *_, slow, stress, last = text.splitlines()
    assert slow == "Left out: 11 tests of the tier slow; run them with --tier slow or --tier all"
    assert stress == "Left out: 1 tests of the tier stress; run them with -m stress"
    assert last.startswith("1 passed")


def test_the_fast_tier_has_one_of_four_emulated_cases_of_a_function(
    project: Run, tmp_path: Path
) -> None:
    devices = '@pytest.mark.parametrize("device", ["cpu", "emulated"])\n'
    cases = '@pytest.mark.parametrize("case", range(5))\n'
    text = f"import pytest\n{devices}{cases}def test_it(case, device): pass\n"
    (tmp_path / "test_two.py").write_text(text, encoding="utf-8")
    shown = project("test_two.py", "-vv")[1]
    passed = re.findall(r"test_it\[(\d)-(\w+)\] PASSED", shown)
    assert sorted(passed) == sorted(
        [*((str(case), "cpu") for case in range(5)), ("0", "emulated"), ("4", "emulated")]
    )


def test_each_way_to_choose_chooses(project: Run) -> None:
    def passed(*arguments: str) -> int:
        return int(project(*arguments)[1].splitlines()[-1].split()[0])

    assert (
        passed("-m", "stress") == passed("test_one.py::test_listed") == passed("-m", "corpus") == 1
    )
    assert (passed("-m", "slow"), passed("--tier", "slow"), passed("--tier", "all")) == (11, 11, 12)
    assert [
        passed("-k", "cases", "--tier", "slow", "--part", f"{number}/2") for number in (7, 8)
    ] == [4, 4], "all cost the same"


def test_a_whole_run_that_executes_too_little_fails(project: Run, tmp_path: Path) -> None:
    skipping = 'import pytest\n@pytest.mark.{}\ndef test_it(): pytest.skip("no reason")\n'
    (tmp_path / "test_gpu.py").write_text(skipping.format("gpu"), encoding="utf-8")
    status, text = project()
    assert status == 0
    assert "Not run: 1 tests that need a GPU; python -m tests.gpu" in text
    (tmp_path / "test_nvcc.py").write_text(skipping.format("nvcc"), encoding="utf-8")
    (tmp_path / "floors.json").write_text(
        json.dumps({"fast": 2, "fast gpu": 99, "slow": 99}), encoding="utf-8"
    )
    status, text = project(HIDDEN="1")
    assert status == 1
    assert "1 tests of 'fast' were executed, and the floor in tests/floors.json is 2" in text
    assert "test_nvcc.py was skipped whole" in text
    assert "torch sees none" in text
    assert "3 failed, 1 passed, 2 skipped" in text.splitlines()[-1]
    assert project("-k", "quick")[0] == 0, "not a whole run"

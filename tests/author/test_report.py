"""What `opjit test` gives to programs and to the next run: JSON, JUnit's XML, --fail-fast and --last-failed."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers import command
from tests.testing.mistakes import BODY, Mistake

CHEAP = ("--device", "cpu", "--sanitize", "none")


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an op whose first result is wrong, in a cache that has seen no run."""
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    return Mistake("wrong", "", body=BODY + "if (n) to[0] = 5;").write(tmp_path / "wrong")


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def test_json_is_all_that_stdout_has(wrong: Path) -> None:
    done = command("test", wrong, *CHEAP, *only("results", "gradients"), "--json")
    assert done.returncode == 1
    results = json.loads(done.stdout)
    assert [(each["name"], each["status"]) for each in results] == [
        ("results", "failed"),
        ("gradients", "skipped"),
    ]
    assert results[0]["subject"] == "mistakes::wrong on cpu"
    assert results[0]["command"] == f"opjit test {wrong} --only results --sample 0"
    assert "mistakes::wrong on cpu" in done.stderr


def test_junit_has_a_case_for_each_check(wrong: Path, tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    some = only("results", "gradients", "fake kernel")
    command("test", wrong, *CHEAP, *some, "--junit", file)
    [suite] = ElementTree.parse(file).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    failure = suite.find("testcase[@name='results']/failure")
    assert failure is not None
    assert failure.get("message", "").startswith("got 5, expected -4")


def test_fail_fast_ends_the_run_at_the_first_failure(wrong: Path) -> None:
    done = command("test", wrong, *CHEAP, "-x")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "1 failed, stopped at the first failure"


def test_last_failed_runs_only_what_failed(wrong: Path) -> None:
    command("test", wrong, *CHEAP, *only("results", "fake kernel"))
    again = command("test", wrong, *CHEAP, "--last-failed", "--json")
    assert [each["name"] for each in json.loads(again.stdout)] == ["results"]


def test_without_a_failure_last_failed_runs_every_check_and_says_so(wrong: Path) -> None:
    done = command("test", wrong, *CHEAP, *only("fake kernel"), "--last-failed")
    assert done.stdout.startswith("no check failed in the last run, so all are run\n")
    assert done.stdout.splitlines()[-1] == "1 ok"


def test_last_failed_runs_every_check_of_an_op_if_only_another_op_failed(
    wrong: Path, tmp_path: Path
) -> None:
    right = Mistake("right", "").write(tmp_path / "right")
    command("test", wrong, *CHEAP, *only("fake kernel", "results"))
    done = command("test", right, *CHEAP, *only("fake kernel"), "--last-failed")
    assert done.stdout.startswith("no check failed in the last run, so all are run\n")
    assert done.stdout.splitlines()[-1] == "1 ok"

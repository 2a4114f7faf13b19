"""tests/gpu.py: how it plans the tests that need a GPU, without one."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import gpu
from tests.helpers import ROOT


def commit(folder: Path, name: str, date: str) -> None:
    text = "import pytest\n\n@pytest.mark.gpu\ndef test_one(): pass\n"
    (folder / name).write_text(text, encoding="utf-8")
    when = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    who = ["-c", "user.name=one", "-c", "user.email=one@example.org"]
    for words in (["add", name], [*who, "commit", "-qm", name]):
        subprocess.run(["git", *words], cwd=folder, env={**os.environ, **when}, check=True)


def test_files_that_were_changed_last_run_first_and_a_table_shows_their_seconds(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n gpu\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path, "test_a_old.py", "2026-01-01T00:00:00Z")
    commit(tmp_path, "test_b_new.py", "2026-03-01T00:00:00Z")
    commit(tmp_path, "test_c_older.py", "2025-01-01T00:00:00Z")
    (tmp_path / "test_d_unknown.py").write_text("def test_one(): pass\n", encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "tests.gpu"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    order = [line.partition("::")[0] for line in done.stdout.splitlines() if "::test_one" in line]
    names = ["test_d_unknown.py", "test_b_new.py", "test_a_old.py", "test_c_older.py"]
    assert order == names
    shown = done.stdout.partition("seconds of all workers by file")[2]
    assert sum("1 tests  test_" in line for line in shown.splitlines()) == 4


@pytest.mark.parametrize(("count", "workers"), [(10, 4), (3, 4), (100, 3)])
def test_each_process_begins_with_one_of_the_first_tests(count: int, workers: int) -> None:
    order = gpu.dealt(range(count), workers)
    assert sorted(order) == list(range(count))
    left = order
    for number in range(workers):  # as pytest-xdist's worksteal cuts the list
        size = len(left) // (workers - number)
        assert left[:size] == sorted(left[:size]), "the first tests first"
        assert all(first < workers for first in left[: min(1, size)])
        left = left[size:]


def test_without_git_the_order_stays(tmp_path: Path) -> None:
    assert gpu.changed(tmp_path) == {}


def test_the_table_sums_what_it_does_not_name() -> None:
    seconds = Counter({f"test_{number}.py": float(number) for number in range(1, 24)})
    counts = Counter(dict.fromkeys(seconds, 2))
    lines = gpu.table(seconds, counts)
    assert len(lines) == gpu.LONGEST + 1
    assert lines[0] == "    23.0 s     2 tests  test_23.py"
    assert lines[-1] == "     6.0 s in 3 other files"


def test_both_runs_share_a_carried_folder_and_options(tmp_path: Path) -> None:
    runs = gpu.commands(tmp_path, ["--part", "1/3"])
    markers = [run[run.index("-m", 3) + 1] for run in runs]
    assert markers == ["gpu and alone", "gpu and not alone"]
    for run in runs:
        assert run[-2:] == ["--part", "1/3"]
        assert f"cache_dir={tmp_path}" in run
    built = gpu.build_command(tmp_path, "sm_90")
    assert built[built.index("--store") + 1] == str(tmp_path / "d" / "opjit")


def test_the_cache_of_tests_is_in_the_carried_folder(pytestconfig: pytest.Config) -> None:
    """--carry relies on the folder that tests/conftest.py names."""
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        pytest.skip("this run has no cache of pytest")
    folder = Path(pytestconfig.cache.mkdir("opjit"))
    assert folder == gpu.cache_of(folder.parents[1])


def test_a_build_needs_a_folder_to_carry(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--build", "sm_90"])
    assert "--build needs --carry FOLDER" in capsys.readouterr().err

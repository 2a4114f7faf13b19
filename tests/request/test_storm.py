"""A short storm; the long one is tests/benchmarks/storm.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import helpers


@pytest.mark.slow
def test_a_storm_of_processes_and_kills_leaves_right_results_and_a_clean_store() -> None:
    script = helpers.ROOT / "tests" / "benchmarks" / "storm.py"
    done = subprocess.run([sys.executable, str(script), "--rounds", "1", "--processes", "18", "--ops", "3"],
                          env=helpers.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("PASS", done.stdout)) == 6

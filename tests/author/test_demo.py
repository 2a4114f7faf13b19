"""`opjit demo` builds an op, loads it in a fresh process, and compares it with torch."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import environment


def test_the_demo_builds_loads_and_compares() -> None:
    done = subprocess.run([sys.executable, "-m", "opjit", "demo"], env=environment({"COLUMNS": "120"}), capture_output=True, text=True,
                          timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "allreduce: the sum of 2^20 float32" in done.stdout
    assert "cpu x86-64-" in done.stdout

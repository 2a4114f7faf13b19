"""`opjit test` without options finds each mistake of the table, names the author's line or the sample, and finishes the run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import environment
from tests.testing.mistakes import MISTAKES, Mistake

# Every sixth mistake, or all of them with OPJIT_TEST_MISTAKES=all: each takes 10 s of a core.
CHOSEN = MISTAKES[:: 1 if os.environ.get("OPJIT_TEST_MISTAKES") == "all" else 6]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one command prints of each op."""
    root = tmp_path_factory.mktemp("mistakes")
    for mistake in CHOSEN:
        mistake.write(root / mistake.name)
    done = subprocess.run(
        [sys.executable, "-m", "opjit", "test", str(root), "--device", "cpu"],
        env=environment(),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "opjit/testing" not in done.stdout + done.stderr, done.stderr
    parts = re.split(r"^mistakes::(\w+) on cpu$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)) | {"": str(root)}


@pytest.mark.parametrize("mistake", CHOSEN, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_where_it_is(mistake: Mistake, tables: dict[str, str]) -> None:
    table = tables[mistake.name]
    if "lacks a library for -fsanitize" in table:
        pytest.skip("the compiler has no sanitizers")
    failed = re.findall(r"^  failed +(.*\n(?: {30}.*\n)*)", table, re.MULTILINE)
    assert any(
        re.search(mistake.pattern(Path(tables[""]) / mistake.name), text) for text in failed
    ), table
    assert re.search(r"^  \w+ +vmap |^ {30}.*\bvmap$", table, re.MULTILINE), table  # the last check
    assert "before its first call" not in table, table

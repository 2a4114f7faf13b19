"""The snippets of each README are the code that runs, and the first op does what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import fresh

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parent.parent
SNIPPET = re.compile(r"<!-- snippet: (\S+)(?: (\S+))? -->\n```\w+\n(.*?)```", re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = [(path.relative_to(ROOT).as_posix(), *found) for path in (ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md")))
            for found in SNIPPET.findall(path.read_text(encoding="utf-8"))]


def region(path: str, name: str | None) -> str:
    """A file's text, or the part between its `begin: name` and `end: name` lines, without the indentation they share."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if name is None:
        return text
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip() == f"# begin: {name}")
    end = next(i for i, line in enumerate(lines) if line.strip() == f"# end: {name}")
    indent = len(lines[begin]) - len(lines[begin].lstrip())
    return "\n".join(line[indent:].partition("  # type: ignore")[0] for line in lines[begin + 1:end]) + "\n"


@pytest.mark.parametrize(("readme", "path", "name", "shown"), SNIPPETS)
def test_a_readme_snippet_is_the_file_that_runs(readme: str, path: str, name: str, shown: str) -> None:
    assert shown == region(path, name or None)


def test_the_readme_has_snippets_and_both_commands() -> None:
    assert len(SNIPPET.findall(README)) == 7
    for command in ("demo", "test"):
        assert len(re.findall(rf"<!-- command: {command} -->\n```sh\n[^\n]+\n```", README)) == 1


def test_the_first_op_of_the_readme_runs_and_differentiates() -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(ROOT / "examples/first_op/scale.py")], capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "tensor([0.0000, 2.5000, 5.0000, 7.5000])" in done.stdout
    assert "tensor([2.5000, 2.5000, 2.5000, 2.5000])" in done.stdout


def test_what_the_readme_calls_is_there_after_import_opjit() -> None:
    fresh("import opjit; opjit.distributed.ready, opjit.testing.CHECKS, opjit.cache.path, opjit.backends.Backend, opjit.load_inline, "
          "opjit.watch, opjit.register_backend")

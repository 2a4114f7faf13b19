"""Other people's programs, built both ways: which go the fast way, why not, and in how many seconds.

    python -m tests.cpp_extension.corpus.public FOLDER

Runs each .py file of the folder in a process of its own, where torch's load_inline takes note of its arguments and ends the file. It runs
what it is given: only for code that you trust.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

NOTED = ("cpp_sources", "cuda_sources", "functions", "extra_cflags", "extra_cuda_cflags", "extra_ldflags", "extra_include_paths",
         "with_cuda", "with_pytorch_error_handling", "no_implicit_headers")
COLLECT = """\
import inspect, json, runpy, sys
from torch.utils import cpp_extension
signature = inspect.signature(cpp_extension.load_inline)
class Collected(BaseException): pass
def note(*values, **named):
    given = signature.bind(*values, **named).arguments
    print("@" + json.dumps({name: given[name] for name in sys.argv[2:] if name in given}))
    raise Collected
cpp_extension.load_inline = note
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
except Collected:
    pass
"""
BUILD = """\
import json, os, sys
arguments = json.load(sys.stdin)
if sys.argv[1] == "fast":
    from opjit import load_inline
else:
    from torch.utils.cpp_extension import load_inline
    os.mkdir(arguments.setdefault("build_directory", os.path.join(os.environ["OPJIT_CACHE"], "torch")))
load_inline(sys.argv[2], **arguments)
"""


def collect(path: Path) -> dict[str, Any] | str:
    """The arguments of the file's load_inline, or why there are none."""
    done = _python(COLLECT, str(path), *NOTED)
    found = [line[1:] for line in done.stdout.splitlines() if line.startswith("@{")]
    if found:
        arguments: dict[str, Any] = json.loads(found[0])
        return arguments
    return _last_line(done) or "no load_inline"


def build(way: str, name: str, arguments: dict[str, Any]) -> tuple[float, str]:
    """Seconds, with Python's start, and what went wrong."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.monotonic()
        done = _python(BUILD, way, name, given=json.dumps(arguments), OPJIT_CACHE=cache)
        return time.monotonic() - began, _last_line(done) if done.returncode else ""


def _python(code: str, *words: str, given: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **changes}
    return subprocess.run([sys.executable, "-c", code, *words], input=given, env=environment, capture_output=True, text=True, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]  # the compiler's come before Python's
    return (errors or lines[-1:] or [""])[0][:100]


def row(path: Path, collected: Callable[[Path], dict[str, Any] | str] = collect) -> str:
    arguments = collected(path)
    if isinstance(arguments, str):
        return f"{path.name:40} {'-':>6} {'-':>6}  {arguments}"
    (fast, problem), (slow, known) = (build(way, "public", arguments) for way in ("fast", "torch"))
    said = "" if not problem else f"fails with torch too: {known}" if known else f"only torch builds it: {problem}"
    return f"{path.name:40} {fast:6.1f} {slow:6.1f}  {said}"


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Build the programs of FOLDER both ways."""
    click.echo(f"{'program':40} {'opjit':>6} {'torch':>6}")
    for path in sorted(folder.rglob("*.py")):
        click.echo(row(path))


if __name__ == "__main__":
    main()

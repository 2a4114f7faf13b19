"""`opjit demo` builds an op, loads it in a fresh process, compares it with torch, and says what to try next."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from opjit.recipe import toolchain
from tests import helpers
from tests.helpers import ROOT, environment

pytestmark = pytest.mark.slow


def run(cache: Path, **variables: str) -> str:
    done = helpers.command("demo", OPJIT_CACHE=str(cache), **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_builds_loads_and_compares_the_op_and_what_it_says_to_try_next_works(
    tmp_path: Path,
) -> None:
    """Layers, a remote and OPJIT_OFFLINE do not change what a cold start is. Nothing is wider than a terminal, or colored, in a pipe. On a
    cold disk an import of torch takes seconds: one process builds for every device, one loads."""
    (tmp_path / "sitecustomize.py").write_text(f"""\
import atexit, os, sys
def note():
    if "torch" in sys.modules:
        open({str(tmp_path / "imported")!r}, "a").write(" ".join(sys.orig_argv).replace(chr(10), " ") + chr(10))
atexit.register(note)
""")
    printed = run(
        tmp_path / "cache",
        OPJIT_OFFLINE="1",
        OPJIT_REMOTE="file:///nowhere",
        OPJIT_LAYERS="/nowhere",
        PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "allreduce: the sum of 2^20 float32" in printed
    row = next(line for line in printed.splitlines() if line.startswith(" cpu "))
    assert re.fullmatch(
        r" cpu \S+ +[\d.]+ m?s +[\d.]+ m?s +[\d.]+ [mu]s +[\d.]+ [mu]s +[\d.]+x +\de-\d\d +\de-\d\d *",
        row,
    )
    assert (tmp_path / "cache/v2/opjit.allreduce").is_dir()
    assert f"  {tmp_path}/cache/v2/opjit.allreduce\n" in printed
    assert "\x1b" not in printed
    assert all(
        len(line) <= 80
        for line in printed.splitlines()
        if str(tmp_path) not in line and sys.executable not in line
    )
    importers = (tmp_path / "imported").read_text().splitlines()
    assert ["demo.report(" in line for line in importers] == [True, True]
    commands = printed.partition("\nNext:")[2].splitlines()[1:4]
    assert [shlex.split(command)[-2:] for command in commands] == [
        ["new", "mylib::scale_add"],
        ["test", "./scale_add"],
        ["bench", "./scale_add"],
    ]
    for command in commands:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment({"OPJIT_CACHE": str(tmp_path / "cache")}),
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "scale_add/op.py").is_file()


@pytest.mark.nvcc
@pytest.mark.skipif(toolchain.find_nvcc(None) is None, reason="no nvcc")
def test_without_a_gpu_the_cuda_op_is_built(tmp_path: Path) -> None:
    printed = run(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert re.search(r"^ cuda sm_90\.cuda\d+ +[\d.]+ s *$", printed, re.MULTILINE)
    assert "No GPU found: the CUDA op was built for sm_90, but not run." in printed


def test_a_dumb_terminal_sees_plain_text(tmp_path: Path) -> None:
    code, printed = helpers.on_terminal(
        "demo", OPJIT_CACHE=str(tmp_path), TERM="dumb", CC="/nowhere/cc"
    )
    assert code == 1  # no compiler: the demo says so at once
    assert "Error: " in printed
    assert "Traceback" not in printed
    assert "\x1b" not in printed

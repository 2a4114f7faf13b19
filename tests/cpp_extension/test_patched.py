"""opjit's load in place of torch's, in code that one may not edit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import helpers
from tests.helpers import fresh

SOURCE = 'extern "C" int value() { return 7; }\n'
LOAD = "print(ctypes.CDLL(load('patched', [{source!r}], is_python_module=False)).value())\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torchs"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "plain.cpp").write_text(SOURCE)
    return str(tmp_path / "plain.cpp")


@pytest.mark.torch
def test_torchs_names_may_be_opjits(source: str) -> None:
    done = fresh(
        """
import ctypes, opjit, torch.utils.cpp_extension
torch.utils.cpp_extension.load = opjit.load
torch.utils.cpp_extension.load_inline = opjit.load_inline
from torch.utils.cpp_extension import load
"""
        + LOAD.format(source=source)
        + "print(opjit.get('allreduce', 'cpu')(torch.ones(3)).item())"
    )
    assert done.stdout == "7\n3.0\n"


@pytest.mark.torch
@pytest.mark.parametrize("imported", [True, False])
def test_torchs_module_may_be_opjits(source: str, imported: bool) -> None:
    done = fresh(
        ("import torch.utils.cpp_extension\n" if imported else "")
        + """
import ctypes, sys, torch, opjit.cpp_extension
sys.modules["torch.utils.cpp_extension"] = opjit.cpp_extension
from torch.utils.cpp_extension import BuildExtension, include_paths, load
from setuptools import Command
print(issubclass(BuildExtension, Command), len(include_paths()) > 0)
"""
        + LOAD.format(source=source)
    )
    assert done.stdout == "True True\n7\n"


@pytest.mark.torch
def test_in_the_block_torchs_functions_are_opjits(source: str) -> None:
    done = fresh(
        """
import ctypes, opjit, torch, torch.utils.cpp_extension as torchs
before = torchs.load
with opjit.cpp_extension.patched():
    from torch.utils.cpp_extension import load, load_inline
    print(load is opjit.load, load_inline is opjit.load_inline)
    """
        + LOAD.format(source=source)
        + """
print(torchs.load is before)
"""
    )
    assert done.stdout == "True True\n7\nTrue\n"


def run(
    *words: str | Path, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """`opjit run` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "opjit", "run", *map(str, words)],
        env=helpers.environment(changes),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_opjit_run_is_python_with_opjits_load_and_children_have_it_too(
    cache: Path, source: str, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("NAME = 'beside'\n")
    program = tmp_path / "code" / "program.py"
    program.write_text(
        "import ctypes, os, subprocess, sys\nfrom beside import NAME\n"
        "print(NAME, __name__, sys.argv[1:], sys.path[0] == os.path.dirname(os.path.abspath(__file__)), flush=True)\n"
        "print(any('site' == os.path.basename(path) for path in sys.path), flush=True)\n"
        f"CODE = '''import ctypes\nfrom torch.utils.cpp_extension import load\n{LOAD.format(source=source)}'''\n"
        "sys.exit(subprocess.run([sys.executable, '-c', CODE]).returncode + 3)\n"
    )
    done = run(program, "--flag", "-h", cwd=tmp_path)
    assert done.stdout == "beside __main__ ['--flag', '-h'] True\nFalse\n7\n", done.stderr
    assert done.returncode == 3
    assert len(helpers.entries(cache)) == 1
    assert not (tmp_path / "torchs").exists()


def test_opjit_run_takes_a_module_shows_its_traceback_and_runs_the_next_sitecustomize(
    tmp_path: Path,
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint(sys.argv[1:], __package__)\nraise ValueError('mine')\n"
    )
    (tmp_path / "sitecustomize.py").write_text("print('another sitecustomize')\n")
    done = run(
        "-m", "package", "one", cwd=tmp_path, PYTHONPATH=f"{helpers.ROOT}{os.pathsep}{tmp_path}"
    )
    assert done.stdout.endswith("another sitecustomize\n['one'] package\n")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: mine\n")
    assert os.path.join("opjit", "cpp_extension") not in done.stderr


def test_opjit_run_finds_an_opjit_that_only_its_own_path_has(tmp_path: Path) -> None:
    if (Path(torch.__file__).parents[1] / "opjit" / "__init__.py").exists():
        pytest.skip("opjit is installed beside torch")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nsys.path[:] = [path for path in sys.path if not os.path.isfile(f'{path}/opjit/__init__.py')]\n"
        "from torch.utils.cpp_extension import load\nimport opjit\nprint(load is opjit.load, opjit.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "opjit", "run", str(program)],
        env=helpers.environment({"PYTHONPATH": None}),
        cwd=helpers.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"True {helpers.ROOT}/opjit/__init__.py\n", done.stderr

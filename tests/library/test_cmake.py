"""find_package(opjit) in a project that is built with CMake."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import write_op

CMAKE = shutil.which("cmake")
PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(program LANGUAGES NONE)
find_package(opjit REQUIRED CONFIG)
opjit_add_library(my_ops OPS plus)
"""


@pytest.mark.slow
@pytest.mark.skipif(CMAKE is None, reason="no cmake")
def test_a_cmake_project_builds_a_library_for_plain_torch(here: Path, tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    name = op.name
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    config = helpers.command("--cmakedir").stdout.strip()

    def cmake(*words: str) -> str:
        done = subprocess.run(
            [str(CMAKE), *words],
            capture_output=True,
            text=True,
            check=False,
            env=helpers.environment(),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    build = tmp_path / "build"
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    cmake("-S", str(tmp_path), "-B", str(build), f"-Dopjit_DIR={config}", python)
    assert "Building my_ops.so with opjit" in cmake("--build", str(build))
    assert "Building" not in cmake("--build", str(build))
    source = op / f"{name}.c"
    source.write_text(source.read_text() + "\n/* edited */\n")
    assert "Building my_ops.so with opjit" in cmake("--build", str(build))

    code = f"import sys, torch; torch.ops.load_library({str(build / 'my_ops.so')!r})"
    code += f"; print(torch.ops.keytest.{name}.default._schema, 'opjit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"keytest::{name}("), done.stderr
    assert done.stdout.endswith(" False\n")

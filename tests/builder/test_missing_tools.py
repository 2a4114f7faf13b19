"""A build without one of its tools names that tool and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opjit.builder import diagnosis
from tests.helpers import environment

TOOLS = ("as", "c++", "c++filt", "cc", "g++", "gcc", "ld", "ninja", "readelf", "sh")
CODE = """\
#include "opjit_cuda.h"

opjit_status alone_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    return OPJIT_LAUNCHED();
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("missing", [("readelf",), ("c++filt",), ("c++", "g++"), ("as",), ("ld",)], ids="+".join)
def test_a_tool_that_path_has_not_is_named_with_its_package(missing: tuple[str, ...], tmp_path: Path) -> None:
    folder, tools = tmp_path / "alone", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    (folder / "op.py").write_text("import opjit\n\n\n@opjit.op('tools::alone(Tensor x) -> Tensor')\ndef alone(x):\n"
                                  "    return x.new_empty(x.shape)\n")
    (folder / "alone.cu").write_text(CODE)
    for tool in set(TOOLS) - set(missing):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(os.path.realpath(found) if tool in ("ninja", "sh") else found)
    done = subprocess.run([sys.executable, "-m", "opjit", "get", str(folder), "--arch", "sm_90"], capture_output=True, text=True,
                          env=environment({"PATH": str(tools), "OPJIT_CACHE": str(tmp_path / "cache")}), check=False)
    if done.returncode == 0 and missing[0] in ("as", "ld", "c++"):
        pytest.skip("the compiler finds its own")
    if "no CUDA compiler" in done.stderr or "needs nvcc" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1, done
    first = done.stderr.splitlines()[0]
    assert any(tool in first for tool in missing) or "compiler" in first, first
    assert "install" in first, first
    assert "OPJIT_CACHE" not in first, first


@pytest.mark.parametrize("line", ["gcc: fatal error: cannot execute 'as': execvp: No such file or directory",
                                  "collect2: fatal error: cannot find 'ld'"])
def test_a_compiler_without_binutils_says_so(line: str, tmp_path: Path) -> None:
    error = diagnosis.diagnose(f"FAILED: x.o\ngcc x.c\n{line}\ncompilation terminated.\n", "ns::op", "cpu x", tmp_path / "logs")
    assert str(error).splitlines()[0] == f"{line}; install binutils (Debian and Ubuntu: apt install binutils)"

"""A library for plain torch: torch.ops.load_library of it defines the ops, in a process that never imports opjit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opjit
from opjit.errors import BuildError
from tests import helpers
from tests.helpers import write_op

OP = """
import opjit, torch

@opjit.op("my_ops::custom_allreduce(Tensor input) -> Tensor")
def custom_allreduce(input):
    return input.new_empty(1, dtype=torch.int)
"""
C = """
#include "opjit.h"

opjit_status custom_allreduce_cpu(const opjit_tensor *input, opjit_tensor *out)
{
    OPJIT_CHECK(input->dtype == OPJIT_INT32 && input->contiguous, "custom_allreduce takes contiguous int32");
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(1), OPJIT_INT32, input));
    int32_t sum = 0;
    for (int64_t i = 0; i < input->numel; i++)
        sum += ((const int32_t *)input->data)[i];
    *(int32_t *)out->data = sum;
    return OPJIT_OK;
}
"""
LOAD = 'torch.ops.load_library("build/libcustom_allreduce_op.so")\n'
USE = """\
A = torch.ones(1024, dtype=torch.int, device='cpu')
b = torch.ops.my_ops.custom_allreduce(A)
print(b.to('cpu'))
"""
SUM = "tensor([1024], dtype=torch.int32)\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the op, and the library that the command made of it."""
    folder = tmp_path_factory.mktemp("project")
    op = folder / "custom_allreduce"
    op.mkdir()
    (op / "op.py").write_text(OP)
    (op / "custom_allreduce.c").write_text(C)
    words = ["get", "./custom_allreduce", "--build-directory", "build"]
    words += ["--name", "libcustom_allreduce_op", "--device", "cpu"]
    done = run(folder, "-m", "opjit", *words)
    assert done.splitlines()[1:] == ["build/libcustom_allreduce_op.so"]
    return folder


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=helpers.environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_the_lines_of_a_tutorial_run_with_torch_alone(project: Path) -> None:
    code = "import torch\n" + LOAD + USE + "import sys\nprint('opjit' in sys.modules)\n"
    assert run(project, "-c", code) == SUM + "False\n"


def test_opjit_may_be_imported_first_or_later_and_its_declaration_serves_the_op(
    project: Path,
) -> None:
    """`meta` shows whose op it is: only the declaration in op.py has a fake kernel."""
    declare = "import opjit\nopjit.add_path('custom_allreduce')\n"
    meta = "print(torch.ops.my_ops.custom_allreduce(A.to('meta')).shape)\n"
    shape = "torch.Size([1])\n"
    first = run(project, "-c", "import torch\nimport opjit\n" + LOAD + USE)
    later = run(project, "-c", "import torch\n" + LOAD + "import opjit\n" + USE)
    assert first == later == SUM
    assert run(project, "-c", "import torch\n" + declare + LOAD + USE + meta) == SUM + shape
    between = "import torch\n" + LOAD + USE + "old = torch.ops.my_ops.custom_allreduce\n"
    again = USE + meta + "print(old(A))\n"
    assert run(project, "-c", between + declare + again) == SUM + SUM + shape + SUM


def test_load_library_takes_the_library_for_plain_torch(project: Path) -> None:
    load = "print(opjit.load_library('build/libcustom_allreduce_op.so'))\n"
    both = "import torch\n" + LOAD + "import opjit\n" + load + LOAD + USE
    assert (
        run(project, "-c", both)
        == "[<OpOverload(op='my_ops.custom_allreduce', overload='default')>]\n" + SUM
    )


def test_a_copied_library_is_whole_and_two_libraries_share_an_op(
    project: Path, tmp_path: Path
) -> None:
    for name in ("one.so", "two.so"):
        shutil.copyfile(project / "build" / "libcustom_allreduce_op.so", tmp_path / name)
    code = f"""
import torch
torch.ops.load_library({str(tmp_path / "one.so")!r})
torch.ops.load_library({str(tmp_path / "two.so")!r})
"""
    assert run(tmp_path, "-c", code + USE) == SUM
    refused = "try:\n    torch.ops.my_ops.custom_allreduce(torch.ones(2))\nexcept RuntimeError as e:\n    print(e)\n"
    assert "takes contiguous int32" in run(tmp_path, "-c", code + refused)


def test_a_library_leaves_an_op_of_another_program_alone(project: Path) -> None:
    code = """
import torch
library = torch.library.Library("my_ops", "DEF")
library.define("custom_allreduce(Tensor input) -> Tensor")
library.impl("custom_allreduce", lambda x: x + 1, "CPU")
"""
    call = "print(torch.ops.my_ops.custom_allreduce(torch.zeros(1)))\n"
    assert run(project, "-c", code + LOAD + call) == "tensor([1.])\n"
    refused = "import opjit\ntry:\n    opjit.add_path('custom_allreduce')\nexcept opjit.errors.DeclarationError as e:\n    print(e)\n"
    assert "torch rejects the op my_ops::custom_allreduce" in run(project, "-c", code + refused)


def test_a_library_has_the_binaries_of_several_architectures(tmp_path: Path) -> None:
    """The best that this CPU can run is chosen; without one, the call is refused instead of a SIGILL."""
    op = write_op(tmp_path / "plus")
    lowest, *_ = helpers.LEVELS
    several = ",".join(helpers.LEVELS)
    words = ["get", str(op), "--build-directory", "build"]
    made = run(tmp_path, "-m", "opjit", *words, "--name", "all", "--arch", several)
    assert made.splitlines() == ["build/all/keytest.plus.so", "build/all.so"]
    code = "import torch\ntorch.ops.load_library('build/all.so')\nprint(torch.ops.keytest.plus(torch.ones(1)))\n"
    assert run(tmp_path, "-c", code) == "tensor([2.])\n"
    (tmp_path / "build" / "taken.so").write_text("")
    with pytest.raises(BuildError, match="is a different library"):
        opjit.build_library("allreduce", tmp_path / "build", arch=[lowest], name="taken")
    with pytest.raises(BuildError, match="is for one of them"):
        opjit.build_library(
            "allreduce", tmp_path / "build", arch=[lowest, helpers.FOREIGN], name="two"
        )


@pytest.mark.gpu
def test_one_library_serves_the_cpu_and_several_gpu_architectures(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    words = ["get", str(op), "--build-directory", "build", "--name", "all"]
    archs = ",".join([helpers.LEVELS[0], "sm_80", "sm_90", "sm_100"])
    run(tmp_path, "-m", "opjit", *words, "--arch", archs)
    code = """
import torch
torch.ops.load_library('build/all.so')
for device in ("cpu", "cuda"):
    print(torch.ops.keytest.plus(torch.ones(1, device=device)).tolist())
"""
    assert run(tmp_path, "-c", code) == "[2.0]\n[2.0]\n"


@pytest.mark.nvcc
def test_a_library_with_binaries_for_gpus_serves_the_cpu_where_torch_has_no_cuda(
    tmp_path: Path,
) -> None:
    op = write_op(tmp_path / "plus")
    path = opjit.build_library(
        [each.qualified for each in opjit.add_path(op)],
        tmp_path / "build",
        arch=["sm_80", "sm_90", helpers.LEVELS[0]],
        name="all",
    )
    code = f"import torch\ntorch.ops.load_library('{path}.so')\nprint(torch.ops.keytest.plus(torch.ones(1)))\n"
    assert run(tmp_path, "-c", code) == "tensor([2.])\n"
    assert "tensor([2.])" in run(
        tmp_path,
        "-c",
        f"import torch, opjit\nplus, = opjit.load_library({str(path)!r})\nprint(plus(torch.ones(1)))\n",
    )

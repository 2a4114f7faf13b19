"""The examples run as their READMEs say, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opjit import backends
from opjit.backends.cpu import Cpu
from opjit.declare import catalog
from opjit.errors import NoKernel
from tests import helpers

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *arguments: str) -> str:
    """What an example prints; it must exit with 0 and warn of nothing."""
    done = helpers.script(ROOT / "examples" / script, *arguments)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_tutorials_op_in_c_and_in_cpp() -> None:
    """compare.py itself stops unless both sides' sums are torch's."""
    printed = run("from_cpp/compare.py")
    ratios = {row[:22].strip(): float(row.split()[-1]) for row in printed.splitlines()[2:]}
    assert list(ratios) == ["build", "library", "call, 2^3 elements", "call, 2^24 elements"]
    assert ratios["build"] < 0.1
    assert ratios["library"] < 0.5


class Toy(Cpu):
    """A backend like the example's, without its device."""

    name = "toy"
    suffix = ".toy.c"


@pytest.mark.slow
def test_a_device_of_ones_own_runs_add_custom_with_autograd() -> None:
    printed = run("out_of_tree_device/example.py")
    assert "device='toy:0'" in printed
    assert "the same as torch.add on the CPU" in printed


def test_a_backend_brings_kernels_for_ops_that_do_not_know_of_it(tmp_path: Path) -> None:
    """The op's own folder is looked into first: its author knows best."""
    backend, op = Toy(), catalog.find("allreduce")
    with pytest.raises(NoKernel, match=rf"no kernel for toy: expected allreduce\.toy\.c in {op.folder}$"):
        op.source(backend)
    backend.kernels = tmp_path
    with pytest.raises(NoKernel, match=rf"expected allreduce\.toy\.c in {op.folder} or {tmp_path}/opjit$"):
        op.source(backend)
    own = tmp_path / "opjit" / "allreduce.toy.c"
    own.parent.mkdir()
    own.touch()
    assert op.source(backend) == own
    backend.suffix = ".c"
    own.rename(own.with_name("allreduce.c"))
    assert op.source(backend) == op.folder / "allreduce.c"
    assert op.source(backends.for_device("cpu")) == op.folder / "allreduce.c"


@pytest.mark.slow
def test_a_training_script_runs_under_torchrun_with_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "examples/cluster/train.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPJIT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                   "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    # Both write to one pipe: their lines may run into each other.
    assert sorted(re.findall(r"rank \d of 2: the sum of all is 3000", done.stdout)) == [f"rank {rank} of 2: the sum of all is 3000"
                                                                                       for rank in range(2)]
    assert "Warning" not in done.stderr

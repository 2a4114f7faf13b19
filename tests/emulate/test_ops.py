"""The CUDA kernels of the bundled ops and of the course run emulated: right, and without a race in the schedules that are tried."""

import re
from pathlib import Path

import pytest

from tests.helpers import ROOT, command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPS = (
    "kernels_c/add_custom",
    "kernels_c/allreduce",
    "kernels_c/lltm",
    "kernels_c/matmul",
    "kernels_c/round_ste",
    "kernels_c/tensor_negate",
    "examples/04_rms_norm_rope",
    "examples/06_from_caffe/round",
)


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_is_right_and_has_no_race(op: str, no_gpu: None) -> None:
    _assert_right(ROOT / op)


@pytest.mark.parametrize("words", [("--cuda",), ("--cuda", "--backward")])
def test_a_new_op_is_right_and_has_no_race(
    words: tuple[str, ...], tmp_path: Path, no_gpu: None
) -> None:
    command("new", "newtest::fresh", str(tmp_path), *words)
    _assert_right(tmp_path / "fresh")


def _assert_right(folder: Path) -> None:
    done = command("test", folder, "--device", "cuda", "--only", "races", "--only", "results")
    lines = done.stdout.splitlines()
    passed = [line for line in lines if re.match(r"  ok +(races|results) +emulated: ", line)]
    subjects = [line for line in lines if line.endswith("results, races and bounds; no timing")]
    assert len(passed) == 2 * len(subjects) > 0, done.stdout
    assert done.returncode == 0

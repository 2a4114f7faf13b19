"""A run that made no call is no success, in any mode of `opjit test`."""

from pathlib import Path

import pytest
import torch

from opjit import testing
from opjit.testing.samples import Skipped
from tests.helpers import MakeOp, command
from tests.testing.mistakes import Mistake

NONE = "    yield from ()\n"
OP_PY = f"""
import opjit

@opjit.op("t::copied(Tensor x, str group) -> Tensor")
def copied(x, group):
    return x.new_empty(x.shape)

copied.reference(lambda x, group: x.clone())

@copied.samples
def samples(device):
{NONE}"""
KERNEL = """
#include "opjit.h"
opjit_status copied_DEVICE(const opjit_tensor *x, const char *group, PARAMETERS)
{
    return opjit_empty_like(out, x, x->dtype);
}
"""
CUDA = KERNEL.replace("opjit.h", "opjit_cuda.h").replace("opjit_status", 'extern "C" opjit_status')


@pytest.fixture
def without_samples(tmp_path: Path) -> Path:
    """The folder of an op for ranks, whose function under @samples yields nothing."""
    folder = tmp_path / "copied"
    folder.mkdir()
    (folder / "op.py").write_text(OP_PY)
    for suffix, device, parameters, text in (
        ("c", "cpu", "opjit_tensor *out", KERNEL),
        ("cu", "cuda", "opjit_tensor *out, cudaStream_t stream", CUDA),
    ):
        kernel = text.replace("DEVICE", device).replace("PARAMETERS", parameters)
        (folder / f"copied.{suffix}").write_text(kernel)
    return folder


@pytest.mark.parametrize(
    "words", [["--ranks", "2"], ["--ranks", "2", "--emulate"], []], ids=["ranks", "emulated", "cpu"]
)
def test_an_op_that_yields_no_sample_was_not_tested(
    without_samples: Path, words: list[str]
) -> None:
    done = command("test", without_samples, *words, "--sanitize", "none")
    assert done.returncode == 1, done.stdout + done.stderr
    told = "nothing was tested: t::copied has no sample for cpu; yield at least one"
    assert told in done.stdout, done.stdout + done.stderr


def test_one_of_two_ops_without_a_sample_makes_the_run_fail(tmp_path: Path) -> None:
    right = Mistake("full", "").write(tmp_path / "full")
    empty = Mistake("empty", "").write(tmp_path / "empty")
    text = (empty / "op.py").read_text()
    (empty / "op.py").write_text(text.partition("def samples")[0] + f"def samples(device):\n{NONE}")
    words = ("--device", "cpu", "--sanitize", "none", "--only", "results")
    done = command("test", right, empty, *words)
    assert done.returncode == 1
    assert "nothing was tested: mistakes::empty has no sample for cpu" in done.stdout


def test_a_check_that_does_not_apply_is_a_skip_and_no_pass(make_op: MakeOp) -> None:
    op = make_op(
        "written(Tensor(a!) x) -> ()",
        "opjit_status written_cpu(opjit_tensor *x) { return OPJIT_OK; }",
    )
    op.reference(lambda x: None)
    op.samples(lambda device: iter([torch.ones(3)]))
    checks = [check for check in testing.CHECKS if check.name == "gradients"]
    with pytest.raises(Skipped, match="nothing was tested: no check applies"):
        testing.check(op, "cpu", checks)

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


@pytest.mark.parametrize("words", [["--ranks", "2"], ["--ranks", "2", "--emulate"]], ids=str)
def test_ranks_that_call_no_element_test_nothing(without_samples: Path, words: list[str]) -> None:
    text = (without_samples / "op.py").read_text()
    sample = "    import torch\n    yield (torch.ones(0), 'nccl'), {}\n"
    (without_samples / "op.py").write_text(text.replace(NONE, sample))
    done = command("test", without_samples, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing was tested" in done.stdout, done.stdout + done.stderr


def test_one_of_two_ops_without_an_element_makes_the_run_fail(tmp_path: Path) -> None:
    right = Mistake("full", "").write(tmp_path / "full")
    hollow = Mistake("hollow", "").write(tmp_path / "hollow")
    text = (hollow / "op.py").read_text().partition("def samples")[0]
    (hollow / "op.py").write_text(f"{text}def samples(device):\n    yield torch.ones(0, 3)\n")
    words = ("--device", "cpu", "--sanitize", "none", "--junit", tmp_path / "junit.xml")
    waived = "".join(
        f"hollow.waive({str(check)!r}, 'slow')\n"
        for check in testing.CHECKS
        if str(check) != "results"
    )
    for folder, name in ((right, "full"), (hollow, "hollow")):
        with (folder / "op.py").open("a") as file:
            file.write(waived.replace("hollow", name))
    done = command("test", right, hollow, *words)
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines()[-1].endswith("nothing was tested: mistakes::hollow")
    done = command("test", right, hollow, "--only", "results", "--only", "numbers", *words)
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines()[-1].endswith("nothing was tested: numbers")


def test_an_op_that_was_only_compiled_was_not_tested(without_samples: Path, no_gpu: None) -> None:
    (without_samples / "copied.c").unlink()
    done = command("test", without_samples)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "1 ok, nothing was tested: t::copied, CUDA compiled and not run"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "cpu"], "use --device cuda"),
        (["--emulate"], "leave out --emulate"),
        ([], "no CUDA GPU is visible"),
    ],
    ids=str,
)
def test_a_check_of_another_device_is_refused(no_gpu: None, words: list[str], told: str) -> None:
    done = command("test", "allreduce", "--only", "cuda graph", *words)
    assert "the check 'cuda graph' runs on cuda only: " in done.stderr, done.stderr
    assert done.returncode == 2
    assert told in done.stderr or "CUDA" in done.stderr


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

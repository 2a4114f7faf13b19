"""`opjit new` writes an op that builds, passes its test and can be measured as it is, or nothing at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opjit import include_path
from opjit.cli import main
from tests.helpers import ROOT, fresh, module, no_compiler, without_pointer


def new(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new", *arguments])


def opjit(folder: Path, *arguments: str) -> str:
    """What the command prints in a process of its own, started in a folder; it must exit with 0 and warn of nothing."""
    done = module("opjit", *arguments, flags=("-W", "error"), cwd=folder)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.mark.slow
def test_four_commands_without_editing(tmp_path: Path) -> None:
    opjit(tmp_path, "new", "newtest::scale_add", "--backward", "--cuda")
    assert sorted(os.listdir(tmp_path)) == ["scale_add"]
    written = sorted(os.listdir(tmp_path / "scale_add"))
    kernels = [f"scale_add{part}.{suffix}" for part in ("", "_backward") for suffix in ("c", "cu")]
    assert written == sorted([".clangd", "op.py", "test_scale_add.py", *kernels])
    built = opjit(tmp_path, "get", "./scale_add", "--device", "cpu").splitlines()
    assert [Path(each).name for each in built] == [
        "newtest.scale_add.so",
        "newtest.scale_add_backward.so",
    ]
    table = opjit(tmp_path, "test", "./scale_add", "--device", "cpu")
    assert "failed" not in table
    for check in ("gradcheck", "compile", "export", "shapes"):
        assert f"ok       {check}" in table
    assert "2^22" in opjit(tmp_path, "bench", "./scale_add", "--device", "cpu")
    assert sorted(os.listdir(tmp_path)) == ["scale_add"]


@pytest.mark.nvcc
def test_its_cuda_kernel_builds_without_a_gpu(tmp_path: Path) -> None:
    new("newtest::with_cuda", str(tmp_path), "--cuda")
    assert "/sm_90.cuda" in opjit(tmp_path, "get", "./with_cuda", "--arch", "sm_90")


def test_its_own_test_passes_without_a_backward(tmp_path: Path) -> None:
    assert new("newtest::plain", str(tmp_path)).exit_code == 0
    assert sorted(os.listdir(tmp_path / "plain")) == [
        ".clangd",
        "op.py",
        "plain.c",
        "test_plain.py",
    ]
    assert include_path() in (tmp_path / "plain" / ".clangd").read_text(encoding="utf-8")
    done = module(
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-k",
        "hand or shapes or results",
        "plain",
        cwd=tmp_path,
        changes={"HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "h")},
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scale",), "expected namespace::name, such as mylib::scale"),
        (("my-lib::scale",), "'my-lib' is not a valid name in both C and Python"),
        (("mylib::for",), "'for' is not a valid name in both C and Python"),
        (("mylib::torch",), "'torch' is taken, by torch or by the files"),
        (("opjit::allreduce",), "as opjit has this op; choose another"),
        (("aten::add",), "'aten' is taken, by torch or by the files"),
        (("cpu", "--backend"), "'cpu' is taken, by torch"),
        (("my-npu", "--backend"), "use letters, digits and _"),
        (("npu", "--backend", "--cuda"), "--backend cannot be combined with"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_and_nothing_is_written(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = new(arguments[0], str(tmp_path), *arguments[1:])
    assert (done.exit_code, os.listdir(tmp_path)) == (2, [])
    assert message in done.output
    # Click shows the usage, too.
    assert len(without_pointer(done.output).strip().splitlines()) == 1 or "Usage:" in done.output


def test_a_backend_s_kernel_builds_where_the_device_is_not_and_runs_on_its_device(
    tmp_path: Path,
) -> None:
    """On the toy device of examples/09_own_device, under the name that it has there."""
    assert new("npu", str(tmp_path), "--backend").exit_code == 0
    done = module(
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "npu",
        cwd=tmp_path,
        changes={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert new("toy", str(tmp_path), "--backend").exit_code == 0
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / "examples" / "09_own_device")!r}]
import torch, toy_device
installed = toy_device.install()
import toy.backend
print(torch.ops.opjit.tensor_negate(torch.tensor([1.0, -2.0], device="toy")).tolist())
"""
    assert fresh(code).stdout == "[-1.0, 2.0]\n"


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "mine").touch()
    done = new("newtest::scale", str(tmp_path))
    assert done.exit_code == 2
    assert "exists already; nothing was written" in done.output
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "scale",
        "scale/mine",
    ]


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> int:
        if self.suffix == ".c":
            raise OSError(28, "No space left on device")
        return 0

    monkeypatch.setattr(Path, "write_text", full)
    done = new("newtest::scale", str(tmp_path))
    assert "cannot be written: [Errno 28] No space left on device" in done.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["newtest::scale", "two words"],
            "\nBuild it and run its checks: opjit test './two words/scale'\n",
        ),
        (["--project", "kernels", "two words"], "cd 'two words/kernels', then"),
    ],
)
def test_the_next_commands_can_be_pasted(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    assert expected in opjit(tmp_path, "new", *arguments)


def test_a_machine_without_a_compiler_can_still_start(tmp_path: Path) -> None:
    done = module("opjit", "new", "newtest::scale", cwd=tmp_path, changes=no_compiler(tmp_path))
    assert done.returncode == 0
    assert (tmp_path / "scale" / "scale.c").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reduction", "in-place", "list", "half"])
def test_an_op_of_another_kind_passes_every_check(tmp_path: Path, kind: str) -> None:
    opjit(tmp_path, "new", "newtest::another", "--kind", kind)
    table = opjit(tmp_path, "test", "./another", "--device", "cpu", "--sanitize", "none")
    assert "ok       results" in table
    assert "failed" not in table


def test_another_kind_is_for_the_cpu_only(tmp_path: Path) -> None:
    refused = new("newtest::another", str(tmp_path), "--kind", "list", "--cuda")
    assert refused.exit_code == 2
    assert "cannot be combined with --backward, --cuda," in refused.output
    assert os.listdir(tmp_path) == []


def test_a_terminal_is_asked_for_the_kind(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    os.write(ours, b"in-place\n")
    done = subprocess.run(
        [sys.executable, "-m", "opjit", "new", "newtest::another", str(tmp_path)],
        stdin=theirs,
        capture_output=True,
        text=True,
        check=True,
    )
    os.close(ours)
    os.close(theirs)
    assert "kind (elementwise, reduction, in-place, list, half)" in done.stdout
    assert "Tensor(a!) x" in (tmp_path / "another" / "op.py").read_text()

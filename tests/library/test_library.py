"""Libraries outside the cache: one process builds into a folder, another loads from it, and only what it can trust."""

import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import backends
from opjit.backends import cpu, cuda, targets
from opjit.backends.cpu import machine_of
from opjit.catalog import registry
from opjit.errors import (
    BuildError,
    DeclarationError,
    DeviceUnavailable,
    LoadError,
    UnknownArch,
    UnknownOp,
)
from opjit.library import load
from opjit.recipe.document import document_key
from opjit.store.entry import Entry
from tests import helpers
from tests.helpers import SOMEBODY, elsewhere, example, fresh, write_op

# The code of a process that builds and prints where the library is.
BUILD = "print(opjit.build_library('keytest::plus', {directory!r}, 'cpu'))"
USE = """
import torch, opjit
plus = opjit.load_library({path!r})
print(plus(torch.ones(1)).tolist(), torch.ops.keytest.plus(torch.zeros(1)).tolist(), plus is torch.ops.keytest.plus.default)
"""
SCHEMA = "loadtest::plus(Tensor x) -> Tensor"  # of the op whose libraries these tests load into their own process


def build_into(directory: Path, op: Path, cache: Path) -> Path:
    done = fresh(
        helpers.declare(op) + BUILD.format(directory=str(directory)), {"OPJIT_CACHE": str(cache)}
    )
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of keytest::plus. The op's folder and the cache are gone."""
    folder = tmp_path_factory.mktemp("library")
    path = build_into(folder / "build", write_op(folder / "plus"), folder / "cache")
    shutil.rmtree(folder / "plus")
    shutil.rmtree(folder / "cache")
    return path


@pytest.fixture(scope="session")
def declared(tmp_path_factory: pytest.TempPathFactory) -> tuple[opjit.Op, Path]:
    """An op that this process declares, and a library of it."""
    folder = tmp_path_factory.mktemp("declared")
    op = write_op(folder / "plus", op_py=helpers.op_py(SCHEMA))
    registry.declare_folder(op)
    return registry.find("loadtest::plus"), opjit.build_library(
        "loadtest::plus", folder / "build", "cpu"
    )


@pytest.fixture
def copied(declared: tuple[opjit.Op, Path], tmp_path: Path) -> Path:
    """A copy of the library's folder, to be damaged; the path of the binary in it."""
    shutil.copytree(declared[1].parent, tmp_path / "copy", symlinks=True)
    return (tmp_path / "copy" / declared[1].name).resolve()


def rewrite(path: Path, **changed: str) -> None:
    """Change a binary's manifest, so that it still agrees with itself."""
    manifest = path.parent / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["document"].update(changed)
    fields["key"] = document_key(fields["document"])
    manifest.write_text(json.dumps(fields))
    path.parent.rename(path.parent.with_name(fields["key"]))


def test_a_process_that_declares_the_op_uses_the_library_in_place_of_a_build(
    built: Path, tmp_path: Path
) -> None:
    code = (
        helpers.declare(write_op(tmp_path / "plus", amount_h="#error not compiled\n"))
        + f"""
plus = opjit.load_library({str(built)!r})
assert opjit.get("keytest::plus", "cpu") is plus is registry.find("keytest::plus").overload
print(torch.compile(lambda x: plus(x) * 2, fullgraph=True, backend="aot_eager")(torch.ones(1)).tolist())
"""
    )
    assert fresh(code, elsewhere(tmp_path)).stdout == "[4.0]\n"


@pytest.mark.torch
def test_an_inline_op_runs_and_says_what_tracing_it_takes(tmp_path: Path) -> None:
    code = f"""
import torch, opjit
opjit.inline("keytest::plus(Tensor x) -> Tensor", c=r'''{helpers.PLUS.replace('#include "amount.h"', "#define AMOUNT 1.0f")}''')
print(opjit.build_library("keytest::plus", {str(tmp_path / "build")!r}, "cpu"))
"""
    path = fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout.strip()
    code = (
        USE.format(path=path)
        + """
assert opjit.get("keytest::plus", "cpu") is plus
for call in (lambda: plus(torch.ones(1, device="meta")),
             lambda: torch.compile(lambda x: plus(x), fullgraph=True, backend="aot_eager")(torch.ones(1))):
    try:
        call()
    except Exception as error:
        assert "has no fake kernel" in str(error), error
        assert "import the module that declares it before opjit.load_library, or declare it in an op.py" in str(error), error
    else:
        raise AssertionError("traced")
"""
    )
    assert fresh(code, elsewhere(tmp_path)).stdout == "[2.0] [1.0] True\n"


@pytest.mark.torch
def test_another_process_uses_the_library_also_where_it_was_moved_to_and_over_a_link(
    built: Path, tmp_path: Path
) -> None:
    shutil.copytree(built.parent, tmp_path / "elsewhere" / "my_ops", symlinks=True)
    (tmp_path / "link.so").symlink_to(tmp_path / "elsewhere" / "my_ops" / built.name)
    assert (
        fresh(USE.format(path=str(tmp_path / "link.so")), elsewhere(tmp_path)).stdout
        == "[2.0] [1.0] True\n"
    )
    assert not (tmp_path / "no-cache").exists()


def test_a_build_directory_holds_a_folder_of_ops_with_binaries_as_a_wheel_does(
    built: Path, tmp_path: Path
) -> None:
    arch = targets.here(helpers.cpu()).arch
    (folder,) = (each for each in built.parents[1].iterdir())
    assert folder.name.rpartition(".")[0] == f"keytest.plus.{arch}"
    inside = built.resolve().parent
    assert inside.parent.name.startswith(f"{arch}-")
    entry = f"plus/prebuilt/v2/keytest.plus/{inside.parent.name}/{inside.name}"
    assert sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ) == [
        "keytest.plus.so",
        "plus/amount.h",
        "plus/op.py",
        "plus/plus.c",
        "plus/plus.cu",
        f"{entry}/keytest.plus.so",
        f"{entry}/manifest.json",
    ]
    code = f"import torch, opjit\nopjit.add_path({str(folder)!r})\nprint(torch.ops.keytest.plus(torch.ones(1)).tolist())"
    assert fresh(code, elsewhere(tmp_path)).stdout == "[2.0]\n"


def test_a_library_may_be_built_into_the_folder_of_its_op(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    for directory in (op / "build", op):
        first = build_into(directory, op, tmp_path / "cache")
        assert build_into(directory, op, tmp_path / "cache") == first
        assert not list(first.parent.rglob("prebuilt/**/prebuilt"))


def test_a_later_build_goes_beside_and_both_can_be_loaded_in_one_process(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    first = build_into(tmp_path / "build", op, tmp_path / "cache")
    before = helpers.snapshot(first.parent)
    assert build_into(tmp_path / "build", op, tmp_path / "cache") == first
    (op / "amount.h").write_text("#define AMOUNT 41.0f\n")
    second = build_into(tmp_path / "build", op, tmp_path / "cache")
    assert second != first
    assert helpers.snapshot(first.parent) == before
    assert len(list((tmp_path / "build").iterdir())) == 2
    code = f"""
import torch, opjit
for path in ({str(first)!r}, {str(second)!r}, {str(second)!r}, {str(first)!r}):
    print(opjit.load_library(path)(torch.ones(1)).tolist(), torch.ops.keytest.plus(torch.ones(1)).tolist())
"""
    assert (
        fresh(code, elsewhere(tmp_path)).stdout
        == "[2.0] [2.0]\n[42.0] [42.0]\n[42.0] [42.0]\n[2.0] [2.0]\n"
    )


def test_processes_that_build_into_one_directory_at_once_leave_one_good_library(
    tmp_path: Path,
) -> None:
    code = helpers.declare(write_op(tmp_path / "plus")) + BUILD.format(
        directory=str(tmp_path / "build")
    )
    running = [helpers.started(code, {"OPJIT_CACHE": str(tmp_path / "cache")}) for _ in range(4)]
    told = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(told) == 1
    assert [path.name for path in (tmp_path / "build").iterdir()] == [Path(told.pop()).parent.name]


def test_a_build_directory_that_cannot_be_written_is_an_error_that_names_it(
    declared: tuple[opjit.Op, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BuildError,
        match=r"loadtest::plus for cpu .* cannot be copied to '.*/file': .*choose a directory that you can write",
    ):
        opjit.build_library("loadtest::plus", tmp_path / "file", "cpu")
    with pytest.raises(UnknownOp):
        opjit.build_library("loadtest::minus", tmp_path)
    with pytest.raises(UnknownArch):
        opjit.build_library("loadtest::plus", tmp_path, arch="sm_9")


def test_a_library_defines_its_op_where_only_torch_is(built_once: tuple[Path, Entry]) -> None:
    code = (
        f"import ctypes, sys, torch\nprint(ctypes.CDLL({str(built_once[1].library)!r}).opjit_define(), 'opjit' in sys.modules)\n"
        "print(torch.ops.keytest.plus(torch.ones(1)).tolist())"
    )
    assert fresh(code).stdout == "0 False\n[2.0]\n"


@pytest.mark.nvcc
def test_a_library_for_a_gpu_is_built_without_one_and_refused_where_there_is_none(
    declared: tuple[opjit.Op, Path], tmp_path: Path
) -> None:
    path = opjit.build_library("loadtest::plus", tmp_path, arch="sm_90")
    assert "sm_90.cuda" in path.parent.name
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceUnavailable, match=r"loadtest\.plus\.so is not loaded: .*CUDA"):
        opjit.load_library(path)


@pytest.mark.gpu
def test_a_library_for_this_gpu_runs(declared: tuple[opjit.Op, Path], tmp_path: Path) -> None:
    plus = opjit.load_library(opjit.build_library("loadtest::plus", tmp_path, "cuda"))
    assert plus(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]


def test_a_library_of_another_schema_is_refused_with_both(
    declared: tuple[opjit.Op, Path], copied: Path
) -> None:
    rewrite(copied, schema="loadtest::plus(Tensor x, int n=0) -> Tensor")
    with pytest.raises(DeclarationError) as caught:
        opjit.load_library(copied.parents[6])
    for part in (
        "built for 'loadtest::plus(Tensor x, int n=0) -> Tensor'",
        f"declares '{SCHEMA}'",
        str(declared[0].folder),
    ):
        assert part in str(caught.value)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "1 bit": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"opjit", b"opjiT", 1)),
        "does not have the SHA-256 in its manifest",
    ),
    "cut off": (
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "does not have the size in its manifest",
    ),
    "another name": (
        lambda path: path.rename(path.with_name("other.so")),
        r"No such file or directory: .*/loadtest\.plus\.so",
    ),
    "bad manifest": (
        lambda path: (path.parent / "manifest.json").write_text("{"),
        "manifest is not JSON",
    ),
    "edited manifest": (
        lambda path: (path.parent / "manifest.json").write_text(
            (path.parent / "manifest.json").read_text().replace('"arch": "', '"arch": "x')
        ),
        "key is not its document's SHA-256",
    ),
    "another key": (
        lambda path: path.parent.rename(path.parent.with_name("0" * 64)),
        "belongs to another build",
    ),
    "others may write it": (
        lambda path: path.chmod(0o646),
        r"can be written by other users \(mode 646\).*; chmod go-w /",
    ),
    "others may write the folder": (
        lambda path: path.parent.chmod(0o777),
        "can be written by other users",
    ),
    "others may swap the folder": (
        lambda path: path.parents[1].chmod(0o777),
        r"\(mode 777\), so other users could replace .*; chmod go-w /",
    ),
    "others may write the manifest": (
        lambda path: (path.parent / "manifest.json").chmod(0o666),
        "can be written by other users",
    ),
    "linked manifest": (
        lambda path: os.symlink(
            (path.parent / "manifest.json").rename(path.parent / "m"), path.parent / "manifest.json"
        ),
        "is a symbolic link",
    ),
    "unknown backend": (
        lambda path: rewrite(path, backend="npu", dispatch_key="PrivateUse1"),
        "add it with opjit.register_backend",
    ),
    "no arch of the backend": (lambda path: rewrite(path, arch="sm_90"), "not one of cpu's"),
    "another arch than its bytes": (
        lambda path: rewrite(path, arch=helpers.FOREIGN, host=str(machine_of(helpers.FOREIGN))),
        f"the library is for {platform.machine()}, not {machine_of(helpers.FOREIGN)}",
    ),
}
if os.geteuid() == 0:
    DAMAGES["another user's"] = (
        lambda path: os.chown(path, SOMEBODY, SOMEBODY),
        f"belongs to user {SOMEBODY}, not to you or root",
    )


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_trusted_is_not_loaded(copied: Path, damage: str) -> None:
    apply, says = DAMAGES[damage]
    apply(copied)
    for path in (copied, copied.parents[6]) if copied.parent.is_dir() else (copied.parents[6],):
        with pytest.raises(LoadError, match=says) as caught:
            opjit.load_library(path)
        assert f"{path} is not loaded: " in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_second_library_beside_a_manifest_is_not_taken_for_its_own(copied: Path) -> None:
    other = copied.with_name("other.so")
    shutil.copy(copied, other)
    with pytest.raises(
        LoadError, match=r"other\.so is not loaded: the rest of its op package is missing; copy"
    ):
        opjit.load_library(other)


@pytest.mark.parametrize("path", ["no/such/library.so", ".", ""])
def test_a_path_without_a_library_is_named(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        LoadError,
        match=rf"there is no library '{path}': expected a path that opjit\.build_library returned",
    ):
        opjit.load_library(path)


def test_a_library_for_more_than_this_machine_has_is_refused_with_what_to_build(
    declared: tuple[opjit.Op, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high = helpers.LEVELS[:2]
    path = opjit.build_library("loadtest::plus", tmp_path, arch=high)
    monkeypatch.setattr(cpu, "_host_arch", lambda: low)
    with pytest.raises(
        LoadError,
        match=re.escape(f"was built for cpu {high}, but this process runs cpu {low}")
        + rf".*arch='{low}'\)",
    ):
        opjit.load_library(path)
    lower = opjit.build_library("loadtest::plus", tmp_path, arch=low)
    monkeypatch.setattr(cpu, "_host_arch", lambda: high)
    assert opjit.load_library(lower)(torch.ones(1)).tolist() == [2.0]
    assert opjit.load_library(path)(torch.ones(1)).tolist() == [2.0]


@pytest.mark.parametrize(
    ("arch", "gpus", "runs"),
    [
        ("sm_90", [(9, 0)], True),
        ("sm_80", [(8, 6)], True),
        ("sm_86", [(8, 0)], False),
        ("sm_80", [(9, 0)], False),
        ("sm_90a", [(9, 0)], True),
        ("sm_100a", [(10, 3)], False),
        ("sm_100f", [(10, 3)], True),
        ("sm_80+sm_90", [(8, 9), (9, 0)], True),
        ("sm_90", [(8, 0), (9, 0)], False),
    ],
)
def test_a_cuda_library_fits_where_its_code_runs(
    monkeypatch: pytest.MonkeyPatch, arch: str, gpus: list[tuple[int, int]], runs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    assert backends.for_device("cuda").runs(arch) is runs


def test_a_library_for_another_major_version_of_cuda_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.Cuda, "available", lambda self: None)
    monkeypatch.setattr(cuda.Cuda, "host_arch", lambda self: "sm_90")
    monkeypatch.setattr(cuda.Cuda, "runs", lambda self, arch: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    target = targets.Target(backends.for_device("cuda"), "sm_90", "cuda13")
    with pytest.raises(
        LoadError,
        match=r"was built for cuda sm_90\.cuda13, but this process runs cuda sm_90\.cuda12",
    ):
        load._refuse_elsewhere(tmp_path, registry.find("allreduce").schema, target)


@pytest.mark.torch
@pytest.mark.slow
def test_the_example_builds_in_one_process_and_is_used_in_another(tmp_path: Path) -> None:
    path = example("tensor_negate/build.py", tmp_path / "build", cwd=tmp_path).strip()
    assert path == f"{tmp_path}/build/my_ops/example.tensor_negate.so"
    assert example(
        "tensor_negate/use.py", tmp_path / "build/my_ops", changes=elsewhere(tmp_path), cwd=tmp_path
    ).splitlines() == [
        "elements 0 to 4999, first 0",  # 20000 bytes of stack hold 5000 elements
        "elements 5000 to 9999, first 9666",
        "elements 10000 to 11999, first 7333",
        "largest difference from torch.neg: 0.0",
        "traced: torch.Size([4000, 3])",
    ]

"""Libraries outside the cache: one process builds into a folder, another loads from it, and only what it can trust."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import backends
from opjit.backends import cpu, cuda, targets
from opjit.declare import catalog
from opjit.errors import BuildError, DeclarationError, DeviceUnavailable, LoadError, UnknownArch, UnknownOp
from opjit.library import contents, load
from opjit.recipe import recipe
from tests import helpers
from tests.helpers import fresh, write_op

pytestmark = pytest.mark.torch
EXAMPLE = helpers.ROOT / "examples" / "tensor_negate"
# The code of a process that builds and prints where the library is.
BUILD = "print(opjit.build_library('keytest::plus', {directory!r}, 'cpu'))"
USE = """
import torch, opjit
plus = opjit.load_library({path!r})
print(plus(torch.ones(1)).tolist(), torch.ops.keytest.plus(torch.zeros(1)).tolist(), plus is torch.ops.keytest.plus.default)
"""
SCHEMA = "loadtest::plus(Tensor x) -> Tensor"  # of the op whose libraries these tests load into their own process


def build_into(directory: Path, op: Path, cache: Path) -> Path:
    done = fresh(helpers.declare(op) + BUILD.format(directory=str(directory)), {"OPJIT_CACHE": str(cache)})
    return Path(done.stdout.strip())


def nothing_else(tmp: Path) -> dict[str, str | None]:
    """An environment without compilers and without a cache that has anything."""
    return {**helpers.no_compiler(tmp), "OPJIT_CACHE": str(tmp / "no-cache"), "OPJIT_OFFLINE": "1"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of keytest::plus. The op's folder and the cache are gone."""
    folder = tmp_path_factory.mktemp("library")
    path = build_into(folder / "build", write_op(folder / "plus"), folder / "cache")
    shutil.rmtree(folder / "plus")
    shutil.rmtree(folder / "cache")
    return path


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> tuple[opjit.Op, Path]:
    """An op that this process declares, and a library of it."""
    folder = tmp_path_factory.mktemp("declared")
    op = write_op(folder / "plus", op_py=helpers.OP_PY.replace(helpers.SCHEMA, SCHEMA))
    catalog.declare_folder(op)
    return catalog.find("loadtest::plus"), opjit.build_library("loadtest::plus", folder / "build", "cpu")


@pytest.fixture
def copied(declared: tuple[opjit.Op, Path], tmp_path: Path) -> Path:
    """A copy of the library's folder, to be damaged; the path of the library in it."""
    shutil.copytree(declared[1].parents[1], tmp_path / "copy")
    return tmp_path / "copy" / declared[1].parent.name / declared[1].name


def rewrite(path: Path, **changed: str) -> None:
    """Change a library's manifest, so that it still agrees with itself and with library.json."""
    manifest = path.parent / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["document"].update(changed)
    fields["key"] = recipe.document_key(fields["document"])
    manifest.write_text(json.dumps(fields))
    described = contents.read(path.parents[1])
    ops = {name: item._replace(key=fields["key"]) for name, item in described.ops.items()}
    (path.parents[1] / contents.NAME).write_bytes(described._replace(ops=ops).dump())


# --- another process -----------------------------------------------------------------------------------------------------------------


def test_another_process_uses_the_library_without_sources_cache_or_compiler(built: Path, tmp_path: Path) -> None:
    before = helpers.snapshot(built.parents[1])
    assert fresh(USE.format(path=str(built)), nothing_else(tmp_path)).stdout == "[2.0] [1.0] True\n"
    assert helpers.snapshot(built.parents[1]) == before
    assert not (tmp_path / "no-cache").exists()


def test_a_process_that_declares_the_op_uses_the_library_in_place_of_a_build(built: Path, tmp_path: Path) -> None:
    code = helpers.declare(write_op(tmp_path / "plus", amount_h="#error not compiled\n")) + f"""
plus = opjit.load_library({str(built)!r})
assert opjit.get("keytest::plus", "cpu") is plus is catalog.find("keytest::plus").overload
print(torch.compile(lambda x: plus(x) * 2, fullgraph=True, backend="aot_eager")(torch.ones(1)).tolist())
"""
    assert fresh(code, nothing_else(tmp_path)).stdout == "[4.0]\n"


def test_an_inline_op_runs_and_says_what_tracing_it_takes(tmp_path: Path) -> None:
    code = f"""
import torch, opjit
opjit.inline("keytest::plus(Tensor x) -> Tensor", c=r'''{helpers.PLUS.replace('#include "amount.h"', '#define AMOUNT 1.0f')}''')
print(opjit.build_library("keytest::plus", {str(tmp_path / 'build')!r}, "cpu"))
"""
    path = fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout.strip()
    code = USE.format(path=path) + f"""
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
from opjit.errors import DeclarationError
from pathlib import Path
from opjit.declare import catalog
try:
    catalog.declare_folder(Path({str(write_op(tmp_path / "plus"))!r}))
except DeclarationError as error:
    assert "import its declaration first, then call opjit.load_library" in str(error), error
else:
    raise AssertionError("declared twice")
print(plus(torch.ones(1)).tolist())
"""
    assert fresh(code, nothing_else(tmp_path)).stdout.endswith("[2.0]\n")


def test_an_op_without_results_can_be_traced(increment: opjit.Op, tmp_path: Path) -> None:
    path = opjit.build_library(increment.qualified, tmp_path / "build", "cpu")
    code = f"""
import torch, opjit
opjit.load_library({str(path)!r})
def twice(x):
    torch.ops.optest.increment(x)
    torch.ops.optest.increment(x)
    return x
print(torch.compile(twice, fullgraph=True, backend="aot_eager")(torch.ones(1)).tolist())
"""
    assert fresh(code, nothing_else(tmp_path)).stdout == "[3.0]\n"


def test_the_folder_may_be_moved_and_linked_to(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built.parents[1], tmp_path / "elsewhere" / "my_ops")
    (tmp_path / "link.so").symlink_to(tmp_path / "elsewhere" / "my_ops" / "keytest.plus" / built.name)
    assert fresh(USE.format(path=str(tmp_path / "link.so")), nothing_else(tmp_path)).stdout == "[2.0] [1.0] True\n"


# --- what a build directory holds ------------------------------------------------------------------------------------------------------


def test_a_build_directory_holds_complete_entries_and_nothing_else(built: Path) -> None:
    arch = targets.here(helpers.cpu()).arch
    (folder,) = built.parents[2].iterdir()
    assert folder.name.rpartition(".")[0] == f"keytest.plus.{arch}"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "keytest.plus/build.ninja", "keytest.plus/keytest.plus.so", "keytest.plus/manifest.json", "keytest.plus/opjit_glue.c",
        "library.json", "python/plus/op.py"]
    assert json.loads((folder / "library.json").read_text())["sha256"].startswith(folder.name.rpartition(".")[2])


def test_a_child_forked_while_another_thread_loads_a_library_can_load_one(built: Path, tmp_path: Path) -> None:
    code = f"""
import os, signal, threading
import torch, opjit
from opjit.declare import catalog
reached, forked = threading.Event(), threading.Event()
look = catalog.declared

def slow(name):
    reached.set()
    forked.wait(1)
    return look(name)

catalog.declared = slow
loader = threading.Thread(target=lambda: opjit.load_library({str(built)!r}))
loader.start()
assert reached.wait(60)
child = os.fork()
catalog.declared = look
if child == 0:
    signal.alarm(30)  # a deadlock kills the child
    opjit.load_library({str(built)!r})
    os._exit(0)
forked.set()
loader.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert fresh(code, {"OPJIT_CACHE": str(tmp_path / "none")}, flags=("-W", "ignore::DeprecationWarning")).stdout == "0\n"


def test_a_later_build_goes_beside_and_both_can_be_loaded_in_one_process(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    first = build_into(tmp_path / "build", op, tmp_path / "cache")
    before = helpers.snapshot(first.parents[1])
    assert build_into(tmp_path / "build", op, tmp_path / "cache") == first
    (op / "amount.h").write_text("#define AMOUNT 41.0f\n")
    second = build_into(tmp_path / "build", op, tmp_path / "cache")
    assert second != first
    assert helpers.snapshot(first.parents[1]) == before
    assert len(list((tmp_path / "build").iterdir())) == 2
    code = f"""
import torch, opjit
for path in ({str(first)!r}, {str(second)!r}, {str(second)!r}, {str(first)!r}):
    print(opjit.load_library(path)(torch.ones(1)).tolist(), torch.ops.keytest.plus(torch.ones(1)).tolist())
"""
    assert fresh(code, nothing_else(tmp_path)).stdout == "[2.0] [2.0]\n[42.0] [42.0]\n[42.0] [42.0]\n[2.0] [2.0]\n"


def test_a_damaged_library_is_built_anew_by_another_file_under_its_name(declared: tuple[opjit.Op, Path], tmp_path: Path) -> None:
    path = opjit.build_library("loadtest::plus", tmp_path, "cpu")
    with open(path, "r+b") as mapped:  # a process that has the old one keeps it
        mapped.write(b"damaged")
        mapped.flush()
        assert opjit.build_library("loadtest::plus", tmp_path, "cpu") == path
        assert not os.path.samestat(os.fstat(mapped.fileno()), path.stat())
    assert path.read_bytes() == declared[1].read_bytes()
    assert list(tmp_path.iterdir()) == [path.parents[1]]


def test_processes_that_build_into_one_directory_at_once_leave_one_good_library(tmp_path: Path) -> None:
    code = helpers.declare(write_op(tmp_path / "plus")) + BUILD.format(directory=str(tmp_path / "build"))
    running = [helpers.started(code, {"OPJIT_CACHE": str(tmp_path / "cache")}) for _ in range(4)]
    told = {process.communicate(timeout=240)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(told) == 1
    assert [path.name for path in (tmp_path / "build").iterdir()] == [Path(told.pop()).parents[1].name]


def test_the_command_leaves_a_library_and_prints_its_path(tmp_path: Path) -> None:
    code = f"from opjit.cli import main\nmain(['get', 'allreduce', '--device', 'cpu', '--build-directory', {str(tmp_path / 'build')!r}])"
    path = fresh(code).stdout.strip()
    assert fresh(f"import torch, opjit\nprint(opjit.load_library({path!r})(torch.ones(3)).item())").stdout == "3.0\n"


def test_a_build_directory_that_cannot_be_written_is_an_error_that_names_it(declared: tuple[opjit.Op, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"loadtest::plus for cpu .* cannot be copied to '.*/file': .*choose a folder that you can write"):
        opjit.build_library("loadtest::plus", tmp_path / "file", "cpu")
    with pytest.raises(UnknownOp):
        opjit.build_library("loadtest::minus", tmp_path)
    with pytest.raises(UnknownArch):
        opjit.build_library("loadtest::plus", tmp_path, arch="sm_9")


@pytest.mark.nvcc
def test_a_library_for_a_gpu_is_built_without_one_and_refused_where_there_is_none(declared: tuple[opjit.Op, Path], tmp_path: Path) -> None:
    path = opjit.build_library("loadtest::plus", tmp_path, arch="sm_90")
    assert "sm_90.cuda" in path.parents[1].name
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceUnavailable, match=r"loadtest\.plus\.so is not loaded: .*CUDA"):
        opjit.load_library(path)


@pytest.mark.gpu
def test_a_library_for_this_gpu_runs(declared: tuple[opjit.Op, Path], tmp_path: Path) -> None:
    plus = opjit.load_library(opjit.build_library("loadtest::plus", tmp_path, "cuda"))
    assert plus(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]


# --- what is refused -------------------------------------------------------------------------------------------------------------------


def test_a_library_of_another_schema_is_refused_with_both(declared: tuple[opjit.Op, Path], copied: Path) -> None:
    rewrite(copied, schema="loadtest::plus(Tensor x, int n=0) -> Tensor")
    with pytest.raises(DeclarationError) as caught:
        opjit.load_library(copied)
    for part in ("built for 'loadtest::plus(Tensor x, int n=0) -> Tensor'", f"declares '{SCHEMA}'", str(declared[0].folder)):
        assert part in str(caught.value)


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit": (lambda path: path.write_bytes(damaged(path.read_bytes())), "does not have the SHA-256 in its manifest"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "does not have the size in its manifest"),
    "no manifest": (lambda path: (path.parent / "manifest.json").unlink(), r"there is no .*/manifest\.json; copy the folder"),
    "no description": (lambda path: (path.parents[1] / "library.json").unlink(),
                       r"there is no library\.json in the folder above its own; copy the folder"),
    "no op.py": (lambda path: (path.parents[1] / "python/plus/op.py").unlink(), r"its file python/plus/op\.py is missing"),
    "edited op.py": (lambda path: (path.parents[1] / "python/plus/op.py").write_text("print('run')"),
                     r"python/plus/op\.py does not have the SHA-256 in its library\.json"),
    "edited description": (lambda path: (path.parents[1] / "library.json").write_text(
        (path.parents[1] / "library.json").read_text().replace('"plus"', '"minus"')), r"library\.json does not have the SHA-256"),
    "bad description": (lambda path: (path.parents[1] / "library.json").write_text("{"), r"library\.json is not JSON"),
    "a list as description": (lambda path: (path.parents[1] / "library.json").write_text("[]"), r"library\.json has another format"),
    "an empty description": (lambda path: (path.parents[1] / "library.json").write_text('{"format": 1}'), "does not have the SHA-256"),
    "others may write op.py": (lambda path: (path.parents[1] / "python/plus/op.py").chmod(0o666), "can be written by others"),
    "others may swap op.py": (lambda path: (path.parents[1] / "python/plus").chmod(0o777), "so others could replace"),
    "linked op.py": (lambda path: os.symlink((path.parents[1] / "python/plus/op.py").rename(path.parent / "m"),
                                             path.parents[1] / "python/plus/op.py"), "is a symbolic link"),
    "another name": (lambda path: path.rename(path.with_name("other.so")), r"there is no .*/loadtest\.plus\.so; copy the folder"),
    "bad manifest": (lambda path: (path.parent / "manifest.json").write_text("{"), "manifest is not JSON"),
    "edited manifest": (lambda path: (path.parent / "manifest.json").write_text(
        (path.parent / "manifest.json").read_text().replace('"arch": "', '"arch": "x')), "key is not its document's SHA-256"),
    "others may write it": (lambda path: path.chmod(0o646), r"can be written by others \(mode 646\).*; chmod go-w /"),
    "others may write the folder": (lambda path: path.parent.chmod(0o777), "can be written by others"),
    "others may swap the folder": (lambda path: path.parents[1].chmod(0o777), r"\(mode 777\), so others could replace .*; chmod go-w /"),
    "others may write the manifest": (lambda path: (path.parent / "manifest.json").chmod(0o666), "can be written by others"),
    "linked manifest": (lambda path: os.symlink((path.parent / "manifest.json").rename(path.parent / "m"), path.parent / "manifest.json"),
                        "is a symbolic link"),
    "unknown backend": (lambda path: rewrite(path, backend="npu", dispatch_key="PrivateUse1"), "add it with opjit.register_backend"),
    "no arch of the backend": (lambda path: rewrite(path, arch="sm_90"), "not one of cpu's"),
    "another arch than its bytes": (lambda path: rewrite(path, arch="aarch64"), "the library is for x86_64, not aarch64"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_trusted_is_not_loaded(copied: Path, damage: str) -> None:
    apply, says = DAMAGES[damage]
    apply(copied)
    with pytest.raises(LoadError, match=says) as caught:
        opjit.load_library(copied)
    assert str(copied) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(LoadError, match="there is no library" if damage == "no description" else says):
        opjit.load_library(copied.parents[1])


def test_a_library_that_somebody_else_owns_is_not_loaded(copied: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(copied, 12345, 12345)
    with pytest.raises(LoadError, match="belongs to user 12345, not to you or root"):
        opjit.load_library(copied)


def test_a_second_library_beside_a_manifest_is_not_taken_for_its_own(copied: Path) -> None:
    other = copied.with_name("other.so")
    shutil.copy(copied, other)
    with pytest.raises(LoadError, match=r"other\.so is not loaded: the library in .* does not name it"):
        opjit.load_library(other)


@pytest.mark.parametrize("path", ["no/such/library.so", ".", ""])
def test_a_path_without_a_library_is_named(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=rf"there is no library '{path}': expected a path that opjit\.build_library returned"):
        opjit.load_library(path)


def test_a_library_for_more_than_this_machine_has_is_refused_with_what_to_build(
    declared: tuple[opjit.Op, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if targets.here(helpers.cpu()).arch == "aarch64":
        pytest.skip("this machine is no x86-64")
    path = opjit.build_library("loadtest::plus", tmp_path, arch="x86-64-v3")
    monkeypatch.setattr(cpu, "_host_arch", lambda: "x86-64-v2")
    with pytest.raises(LoadError, match=r"was built for cpu x86-64-v3, but this process runs cpu x86-64-v2.*arch='x86-64-v2'\)"):
        opjit.load_library(path)
    lower = opjit.build_library("loadtest::plus", tmp_path, arch="x86-64-v2")
    monkeypatch.setattr(cpu, "_host_arch", lambda: "x86-64-v3")
    assert opjit.load_library(lower)(torch.ones(1)).tolist() == [2.0]
    assert opjit.load_library(path)(torch.ones(1)).tolist() == [2.0]


@pytest.mark.parametrize(("arch", "gpus", "runs"), [
    ("sm_90", [(9, 0)], True), ("sm_80", [(8, 6)], True), ("sm_86", [(8, 0)], False), ("sm_80", [(9, 0)], False),
    ("sm_90a", [(9, 0)], True), ("sm_100a", [(10, 3)], False), ("sm_100f", [(10, 3)], True),
    ("sm_80+sm_90", [(8, 9), (9, 0)], True), ("sm_90", [(8, 0), (9, 0)], False)])
def test_a_cuda_library_fits_where_its_code_runs(
    monkeypatch: pytest.MonkeyPatch, arch: str, gpus: list[tuple[int, int]], runs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    assert backends.for_device("cuda").runs(arch) is runs


def test_a_library_for_another_major_version_of_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.Cuda, "available", lambda self: None)
    monkeypatch.setattr(cuda.Cuda, "host_arch", lambda self: "sm_90")
    monkeypatch.setattr(cuda.Cuda, "runs", lambda self, arch: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    target = targets.Target(backends.for_device("cuda"), "sm_90", "cuda13")
    with pytest.raises(LoadError, match=r"was built for cuda sm_90\.cuda13, but this process runs cuda sm_90\.cuda12"):
        load._refuse_elsewhere(tmp_path, catalog.find("allreduce").schema, target)


# --- the example -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_builds_in_one_process_and_is_used_in_another(tmp_path: Path) -> None:
    def run(script: str, argument: Path | str, **changes: str | None) -> str:
        done = helpers.script(EXAMPLE / script, argument, changes=changes, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    path = run("build.py", tmp_path / "build").strip()
    assert path == f"{tmp_path}/build/my_ops/example.tensor_negate/example.tensor_negate.so"
    assert run("use.py", tmp_path / "build" / "my_ops", **nothing_else(tmp_path)).splitlines() == [
        "elements 0 to 4999, first 0",  # 20000 bytes of stack hold 5000 elements
        "elements 5000 to 9999, first 9666",
        "elements 10000 to 11999, first 7333",
        "largest difference from torch.neg: 0.0",
        "traced: torch.Size([4000, 3])",
    ]

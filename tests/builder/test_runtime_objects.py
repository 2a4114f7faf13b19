"""What every op is linked with: the runtime, compiled once, and stubs of torch's libraries."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from opjit import backends
from opjit.backends.targets import Target
from opjit.builder import parts, runtime_objects
from opjit.recipe import toolchain
from opjit.store import elf
from opjit.store.store import Store
from tests import helpers
from tests.helpers import LEVELS, fresh, write_op

pytestmark = pytest.mark.usefixtures("compiled")
CALLS = "void aoti_torch_check(void); void opjit_test_absent(void);\nvoid call(void) { aoti_torch_check(); }\n"


@pytest.fixture
def compiled(copied_parts: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are really made, each time."""
    monkeypatch.setattr(runtime_objects, "_make", copied_parts)


def made(base: Path, arch: str = LEVELS[1], backend: str = "cpu") -> Path:
    target = Target(backends.for_device(backend), arch)
    flags = target.backend.flags(target.arch, "cuda13" if backend == "cuda" else "")
    return runtime_objects.folder(base, toolchain.require_compiler(None), flags)[0]


def link(folder: Path, source: str, linker: str, work: Path) -> subprocess.CompletedProcess[str]:
    (work / "call.c").write_text(source)
    return subprocess.run(
        [
            "gcc",
            f"-fuse-ld={linker}",
            "-shared",
            "-fPIC",
            "call.c",
            f"-L{folder}",
            "-Wl,--no-as-needed",
            "-ltorch_cpu",
            "-lc10",
            "-Wl,-z,defs",
            "-o",
            "call.so",
        ],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.torch
@pytest.mark.parametrize("linker", ["bfd", "gold", "lld", "mold"])
def test_a_linker_takes_the_stubs_and_finds_a_missing_function(tmp_path: Path, linker: str) -> None:
    if shutil.which(f"ld.{linker}") is None:
        pytest.skip(f"no ld.{linker}")
    folder = made(tmp_path / "base")
    done = link(folder, CALLS, linker, tmp_path)
    assert done.returncode == 0, done.stderr
    assert elf.inspect((tmp_path / "call.so").read_bytes()).needed >= {"libtorch_cpu.so"}
    refused = link(
        folder, CALLS.replace("{ aoti_torch_check", "{ opjit_test_absent"), linker, tmp_path
    )
    assert refused.returncode != 0
    assert "opjit_test_absent" in refused.stderr


@pytest.mark.torch
def test_each_function_of_the_header_is_in_the_library_that_has_it(tmp_path: Path) -> None:
    folder = made(tmp_path, "sm_90", "cuda")
    defined = {
        name: {
            line.split()[-1]
            for line in subprocess.run(
                ["nm", "-D", folder / f"{name}.so"], stdout=subprocess.PIPE, text=True, check=True
            ).stdout.splitlines()
        }
        for name in ("libtorch_cpu", "libtorch_cuda")
    }
    assert {"aoti_torch_check", "torch_parallel_for"} <= defined["libtorch_cpu"]
    assert "aoti_torch_get_current_cuda_stream" in defined["libtorch_cuda"]
    assert not defined["libtorch_cpu"] & defined["libtorch_cuda"]


def test_the_runtime_is_compiled_once_for_all_ops(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cc = helpers.fake_compiler(
        tmp_path / "cc", f'case "$*" in *opjit_runtime.c*) echo x >> {log};; esac'
    )
    code = (
        helpers.declare(write_op(tmp_path / "op"))
        + "opjit.get('keytest::plus', 'cpu'); opjit.get('allreduce', 'cpu')"
    )
    fresh(code, {"CC": str(cc), "OPJIT_CACHE": str(tmp_path / "cache")})
    assert log.read_text() == "x\n"


@pytest.mark.parametrize("damage", ["missing", "changed", "foreign list", "no list"])
def test_a_damaged_part_is_made_again(tmp_path: Path, damage: str) -> None:
    folder = made(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if damage == "missing":
        (folder / "libtorch_cpu.so").unlink()
    elif damage == "changed":
        (folder / runtime_objects.OBJECTS[0]).write_bytes(
            before[runtime_objects.OBJECTS[0]][:-1] + b"?"
        )
    elif damage == "foreign list":
        (folder / "parts.json").write_text("[]")
    else:
        (folder / "parts.json").unlink()
    assert made(tmp_path) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_parts_that_others_can_write_are_not_linked(tmp_path: Path) -> None:
    folder = made(tmp_path)
    os.chmod(folder / runtime_objects.OBJECTS[0], 0o666)
    (folder / runtime_objects.OBJECTS[0]).write_bytes(b"")
    assert (made(tmp_path) / runtime_objects.OBJECTS[0]).stat().st_size > 0


def test_parts_of_a_layer_which_may_have_none_are_not_made_again_unless_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path) -> None:
        (folder / "part").write_text("part")

    shared = parts.kept(Store(tmp_path / "layer").base, "content", ("part",), (), make)
    monkeypatch.setenv("OPJIT_LAYERS", f"{tmp_path / 'empty'}:{tmp_path / 'layer'}")
    own = Store(tmp_path / "own").base
    assert (
        parts.kept(own, "content", ("part",), (), lambda folder: pytest.fail(f"made {folder}"))
        == shared
    )
    (shared / "part").write_text("damaged")
    assert parts.kept(own, "content", ("part",), (), make).parent == own / "parts"


def test_two_processes_that_need_one_part_at_once_make_it_once(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from opjit import backends
from opjit.backends.targets import Target
from opjit.builder import parts, runtime_objects
from opjit.recipe import toolchain
made = runtime_objects._make
def make(*arguments):
    with open({str(tmp_path / "made")!r}, "a") as log:
        log.write("x")
    time.sleep(1)
    made(*arguments)
runtime_objects._make = make
target = Target(backends.for_device("cpu"), {LEVELS[1]!r})
flags = target.backend.flags(target.arch, "")
place, _ = runtime_objects.folder(pathlib.Path({str(tmp_path / "base")!r}), toolchain.require_compiler(None), flags)
print(place, flush=True)
"""
    running = [helpers.started(code, {}) for _ in range(2)]
    places = {process.communicate(120)[0] for process in running}
    assert len(places) == 1
    assert str(tmp_path) in places.pop()
    assert (tmp_path / "made").read_text() == "x"

"""The manager of Triton's cache: it returns only files that it wrote and that nobody has changed since. Most tests need no Triton."""

import importlib
import os
import random
import shutil
import sys
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from opjit import files
from opjit.ahead import record
from opjit.ahead.precompile import check_precompiled, precompile
from opjit.declare import oplist
from opjit.errors import CacheWarning, PrecompileError
from opjit.share import trust
from tests import helpers
from tests.helpers import SOMEBODY, as_root, cache_command, cache_warnings, open_to_group, tmpfs

HAS_TRITON = find_spec("triton") is not None
FILES = {"add.ptx": b"text of PTX", "add.cubin": b"\x7fELF" + bytes(range(200)), "add.json": b"{}"}
PROGRAM = """
import hashlib
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


hits = []
knobs.compilation.listener = lambda **said: hits.append(said["cache_hit"])
types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "B": "constexpr"}
source = ASTSource(add, signature=types, constexprs={"B": 128})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(hits[0], hashlib.sha256(kernel.asm["cubin"]).hexdigest())
"""


STARTS = """
import os
import sys

started = []


def note(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        started.append(os.path.basename(arguments[0]))


sys.addaudithook(note)
"""
EXTENSION = """
import torch
import opjit
from torch.utils.cpp_extension import load_inline

source = "at::Tensor twice(at::Tensor x) { return x + x; }"
twice = load_inline("ext", source, functions="twice").twice(torch.ones(1))
total = opjit.get("allreduce", "cpu")(torch.ones(3))
print(twice.item(), total.item(), {*started} <= {"ldconfig", "ptxas"})
"""


def stand_in() -> ModuleType:
    """The classes of triton.runtime.cache that the manager uses, with the interface of Triton 3.8 and 3.9."""
    made = ModuleType("triton.runtime.cache")

    class CacheManager(ABC):
        @abstractmethod
        def get_file(self, filename: str) -> str | None: ...

        @abstractmethod
        def put(self, data: Any, filename: str, binary: bool = True) -> str: ...

        @abstractmethod
        def get_group(self, filename: str) -> dict[str, str] | None: ...

        @abstractmethod
        def put_group(self, filename: str, group: dict[str, str]) -> str: ...

    class FileCacheManager:
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.key = key

    vars(made).update(CacheManager=CacheManager, FileCacheManager=FileCacheManager)
    return made


@pytest.fixture(scope="module")
def adapter() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TRITON:
            made = stand_in()
            for name in ("triton", "triton.runtime", "triton.runtime.cache"):
                patch.setitem(sys.modules, name, made)
        patch.delitem(sys.modules, "opjit.adapters.triton", raising=False)
        yield importlib.import_module("opjit.adapters.triton")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "stock"))
    return tmp_path / "cache"


def compiled(adapter: Any, key: str = "KEY") -> Any:
    """The manager of a kernel after its compilation."""
    manager = adapter.Manager(key)
    manager.put_group("add.json", {name: manager.put(FILES[name], name) for name in FILES})
    return manager


def contents(adapter: Any, key: str = "KEY") -> dict[str, bytes] | None:
    """The files of a kernel as another process finds them."""
    found = adapter.Manager(key).get_group("add.json")
    return found and {name: Path(path).read_bytes() for name, path in found.items()}


def stored(cache: Path, name: str) -> Path:
    (found,) = cache.glob(f"v2/parts/triton-KEY/*-{name}")
    return found


def test_a_compiled_kernel_is_found_by_its_key(adapter: Any) -> None:
    assert contents(adapter) is None
    manager = compiled(adapter)
    assert contents(adapter) == FILES
    assert contents(adapter, "OTHER") is None
    assert adapter.Manager("KEY").get_file("add.so") is None
    assert Path(manager.put("text", "add.so")).read_text() == "text"
    assert Path(adapter.Manager("KEY").get_file("add.so")).suffix == ".so"


@pytest.mark.slow
def test_each_of_a_thousand_flipped_bytes_is_a_miss_that_a_compilation_repairs(
    adapter: Any, cache: Path
) -> None:
    compiled(adapter)
    places = sorted(cache.glob("v2/parts/triton-KEY/*"))
    assert len(places) == len(FILES) + 1
    generator = random.Random(1)
    refused = 0
    for _ in range(1000):
        place = generator.choice(places)
        damaged = bytearray(place.read_bytes())
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        place.write_bytes(damaged)
        with cache_warnings() as texts:
            refused += contents(adapter) is None
        assert place.name in texts[0]
        compiled(adapter)
        assert contents(adapter) == FILES
    assert refused == 1000


def test_what_others_write_into_the_directory_of_triton_is_not_read(
    adapter: Any, tmp_path: Path
) -> None:
    """Inductor's bundler does, past the manager."""
    shutil.copytree(tmp_path, tmp_path / "stock" / "KEY")
    for name, content in FILES.items():
        (tmp_path / "stock" / "KEY" / name).write_bytes(content)
    assert contents(adapter) is None
    assert adapter.Manager("KEY").get_file("add.cubin") is None


def test_a_file_that_the_manager_did_not_write_is_a_miss(adapter: Any, cache: Path) -> None:
    compiled(adapter)
    place = stored(cache, "add.cubin")
    place.rename(place.with_name("add.cubin"))
    with cache_warnings():
        assert contents(adapter) is None
    assert adapter.Manager("KEY").get_file("add.cubin") is None
    place.symlink_to(place.with_name("add.cubin"))
    with pytest.warns(CacheWarning, match="is a symbolic link"):
        assert contents(adapter) is None


@as_root
def test_another_user_s_file_is_a_miss(adapter: Any, cache: Path) -> None:
    compiled(adapter)
    os.chown(stored(cache, "add.cubin"), SOMEBODY, -1)
    with pytest.warns(CacheWarning, match=f"belongs to user {SOMEBODY}"):
        assert contents(adapter) is None


@pytest.mark.parametrize("inner", ["", "v2/parts", "v2/parts/triton-KEY"])
def test_a_cache_that_others_can_write_is_neither_read_nor_written(
    adapter: Any, cache: Path, inner: str
) -> None:
    compiled(adapter)
    open_to_group(cache / inner)
    before = helpers.snapshot(cache)
    with cache_warnings() as texts:
        assert contents(adapter) is None
        path = adapter.Manager("KEY").put(b"other", "add.cubin")
    assert "can be written by other users" in texts[-1]
    assert Path(path).read_bytes() == b"other"
    assert not Path(path).is_relative_to(cache)
    assert files.replacement_risk(Path(path)) is None
    assert helpers.snapshot(cache) == before


def test_a_kernel_that_cannot_be_stored_is_kept_for_the_process(adapter: Any, cache: Path) -> None:
    (cache / "v2").mkdir(parents=True)
    (cache / "v2" / "parts").touch()
    with pytest.warns(CacheWarning, match="the cache cannot be written"):
        path = adapter.Manager("KEY").put(FILES["add.ptx"], "add.ptx")
    assert Path(path).read_bytes() == FILES["add.ptx"]


@as_root
def test_a_full_disk_leaves_no_half_kernel(adapter: Any, cache: Path) -> None:
    cache.mkdir()
    with tmpfs(cache, "size=16k"):
        with pytest.warns(CacheWarning, match="No space left"):
            path = adapter.Manager("KEY").put(bytes(1 << 16), "add.cubin")
        assert Path(path).stat().st_size == 1 << 16
        assert adapter.Manager("KEY").get_file("add.cubin") is None


def test_a_read_only_layer_serves_kernels(
    adapter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(adapter)
    layer = cache.rename(cache.with_name("layer"))
    before = helpers.snapshot(layer)
    monkeypatch.setenv("OPJIT_LAYERS", str(layer))
    assert contents(adapter) == FILES
    assert helpers.snapshot(layer) == before
    assert not cache.exists()


@pytest.mark.slow
def test_processes_that_write_at_once_and_are_killed_leave_whole_kernels(
    adapter: Any, cache: Path
) -> None:
    if not HAS_TRITON:
        pytest.skip("the writers are other processes, which need Triton; it is not installed")
    code = f"""
    from opjit.adapters.triton import Manager
    manager = Manager("KEY")
    files = {FILES!r}
    while True:
        manager.put_group("add.json", {{name: manager.put(files[name], name) for name in files}})
    """
    with helpers.process(code) as one, helpers.process(code) as two:
        helpers.until(lambda: contents(adapter) is not None)
        assert all(contents(adapter) == FILES for _ in range(200))
        one.end()
        two.end()
    assert contents(adapter) == FILES


def test_kernels_are_pruned_like_other_parts(adapter: Any, cache: Path) -> None:
    from opjit.store import inventory
    from opjit.store.store import Store

    compiled(adapter)
    (part,) = inventory.parts(Store(cache))
    assert part.size > sum(map(len, FILES.values()))
    os.utime(part.folder, (1, 1))
    assert contents(adapter) == FILES
    (used,) = inventory.parts(Store(cache))
    assert used.read > 1


def test_directories_in_which_a_user_edits_kernels_stay_with_triton(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_OVERRIDE_DIR", str(tmp_path))
    manager = adapter.Manager("KEY", override=True)
    assert type(manager) is adapter.FileCacheManager
    assert not isinstance(manager, adapter.Manager)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_triton_compiles_a_damaged_kernel_again(cache: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    changes = {"TRITON_CACHE_MANAGER": "opjit.adapters.triton:Manager"}

    def run() -> list[str]:
        done = helpers.script(program, changes=changes, flags=())
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    compiled, digest = run()
    assert (compiled, run()) == ("False", ["True", digest])
    (place,) = cache.glob("v2/parts/triton-*/*.cubin")
    damaged = bytearray(place.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    place.write_bytes(damaged)
    assert run() == ["False", digest]
    assert run() == ["True", digest]
    assert not (tmp_path / "stock").exists()


def test_a_recorded_kernel_that_no_cache_has_is_named_before_a_job(
    adapter: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "raw"
    raw.touch()
    monkeypatch.setenv("OPJIT_RECORD", str(raw))
    assert contents(adapter) is None
    monkeypatch.delenv("OPJIT_RECORD")
    listed = tmp_path / "ops.json"
    listed.write_text(oplist.dump_list(*record._gather(raw)))
    missing = "Triton's kernel add.json is not cached"
    with pytest.raises(PrecompileError, match=missing):
        check_precompiled(listed)
    with pytest.raises(PrecompileError, match=missing):
        precompile(recorded=listed)
    compiled(adapter)
    assert check_precompiled(listed) == 1
    assert check_precompiled(listed, store=cache) == 1
    with pytest.raises(PrecompileError, match=missing):
        check_precompiled(listed, store=tmp_path / "other")
    (tmp_path / "cache").rename(tmp_path / "layer")
    monkeypatch.setenv("OPJIT_LAYERS", str(tmp_path / "layer"))
    assert check_precompiled(listed) == 1


def test_a_list_cannot_name_a_directory_outside_the_cache(adapter: Any, tmp_path: Path) -> None:
    for key in ("../../../elsewhere", None):
        call = oplist.RecordedExtension("triton", {"name": "add.json"}, None)
        if key is not None:
            call.arguments["key"] = key
        (tmp_path / "ops.json").write_text(oplist.dump_list([], [call]))
        with pytest.raises(PrecompileError, match="is not cached"):
            check_precompiled(tmp_path / "ops.json")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_program_starts_from_one_signed_file_with_an_empty_path(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Triton kernel, a C++ extension and an op. Triton asks its ptxas for the version, and starts nothing else."""
    key, public = trust.keygen("ci", tmp_path / "keys")
    monkeypatch.setenv("OPJIT_TRUST", public)
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "opjit.adapters.triton:Manager")
    program = tmp_path / "program.py"
    program.write_text(STARTS + PROGRAM + EXTENSION)
    listed = tmp_path / "ops.json"
    done = helpers.command(
        *("record", "-o", listed, "--", sys.executable, "-m", "opjit", "run", program)
    )
    assert "1 ops, 2 extensions and kernels" in done.stderr, done.stderr
    assert check_precompiled(listed, extensions=True) == 3
    tree = tmp_path / "tree"
    assert cache_command(
        *("pack", str(tree), "--tree", "OPJIT_LAYERS", str(cache), "--sign", str(key))
    ).output.endswith(" 0 left out\n")
    changes = {
        "OPJIT_CACHE": str(tmp_path / "node"),
        "OPJIT_OFFLINE": "1",
        "PATH": str(tmp_path / "nothing"),
    }
    ran = helpers.command("run", "--tree", tree, program, **changes)
    assert ran.stdout.startswith("True "), ran.stderr
    assert ran.stdout.endswith("\n2.0 3.0 True\n"), ran.stderr

"""The binaries: the same bytes wherever they are built, nothing of the machine in them, and no more asked for than allowed."""

import ctypes
import getpass
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from opjit.backends import cpu as cpu_backend
from opjit.backends import targets
from opjit.backends.cpu import machine_of
from opjit.errors import EntryError
from opjit.recipe import toolchain
from opjit.store import elf
from opjit.store.entry import Entry, check_library
from tests import helpers
from tests.helpers import built, cuda_target, fresh, program, write_op

OTHER = os.environ.get("OPJIT_TEST_OTHER_PYTHON")
CUDA_NEEDED = {"libtorch_cpu.so", "libtorch_cuda.so", "libc.so.6"}


@pytest.fixture(scope="module")
def cuda_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Entry]:
    folder = tmp_path_factory.mktemp("cuda")
    return folder, built(write_op(folder / "plus"), folder / "cache", cuda_target("sm_80+sm_90"))


def places(folder: Path) -> list[str]:
    """Paths of this machine, and names that would give it away."""
    nvcc = toolchain.find_nvcc(None)
    found = [
        str(folder),
        folder.name,
        str(helpers.ROOT),
        os.path.expanduser("~"),
        sys.prefix,
        sysconfig.get_path("purelib"),
        sysconfig.get_path("include"),
        str(Path(torch.__file__).parent),
        os.getcwd(),
        socket.gethostname(),
        "/tmp/",
        "/home/",
        "/root/",
        "staging",
        "kernels_c",
    ]
    if nvcc is not None:
        found.append(nvcc.root)
    if getpass.getuser() not in ("root", ""):
        found.append(getpass.getuser())
    return [place for place in found if len(place) > 3]


def assert_clean(content: bytes, folder: Path) -> None:
    assert [place for place in places(folder) if place.encode() in content] == []


def readelf(library: Path, *options: str) -> str:
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("readelf (binutils) is not installed")
    return subprocess.run(
        [tool, "--wide", *options, str(library)], capture_output=True, text=True, check=True
    ).stdout


def test_a_binary_holds_no_path_of_the_machine(built_once: tuple[Path, Entry]) -> None:
    content = built_once[1].library.read_bytes()
    assert_clean(content, built_once[0].parent)
    assert b"plus.c\0" in content  # the kernel's errors name its file all the same


@pytest.mark.torch
def test_a_binary_asks_for_exactly_what_it_needs_and_readelf_agrees(
    built_once: tuple[Path, Entry],
) -> None:
    found = elf.inspect(built_once[1].library.read_bytes())
    # TLS needs the loader.
    assert found.needed - {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"} == {
        "libtorch_cpu.so",
        "libc.so.6",
    }
    assert found.needed <= cpu_backend.NEEDED
    assert (found.run_path, found.cuda_archs) == (None, frozenset())
    text = readelf(built_once[1].library, "--dynamic")
    assert {
        line.partition("[")[2].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line
    } == found.needed
    assert not re.search(r"\((RUNPATH|RPATH|TEXTREL)\)|TEXTREL", text)


def test_a_binary_is_stripped_and_exports_opjit_s_functions_only(
    built_once: tuple[Path, Entry],
) -> None:
    assert not re.search(r"\.symtab|\.debug", readelf(built_once[1].library, "--sections"))
    symbols = [line.split() for line in readelf(built_once[1].library, "--dyn-syms").splitlines()]
    exported = {
        words[7]
        for words in symbols
        if len(words) == 8 and words[4] == "GLOBAL" and words[5] == "DEFAULT" and words[6] != "UND"
    }
    assert exported == {
        "opjit_set_variant",
        "opjit_define",
        "opjit_force_variant",
        "opjit_kernel",
        "opjit_redirect",
        "opjit_prepare",
        "opjit_register",
        "opjit_share_groups",
        "opjit_share_interrupts",
        "opjit_unregister",
        "opjit_enable_variants",
    }


def test_a_binary_does_nothing_when_it_is_opened_and_makes_no_stack_executable(
    built_once: tuple[Path, Entry],
) -> None:
    sections = readelf(built_once[1].library, "--sections")
    for name in (".init_array", ".fini_array"):  # of the C runtime's own pointer, and no other
        sizes = [
            int(line.split(name)[1].split()[4], 16)
            for line in sections.splitlines()
            if f" {name} " in line
        ]
        assert all(size <= 8 for size in sizes), sections
    [stack] = [
        line
        for line in readelf(built_once[1].library, "--segments").splitlines()
        if "GNU_STACK" in line
    ]
    assert " RWE " not in stack


BUILD = """
import json, hashlib
from opjit import backends, request
from opjit.backends import targets
from opjit.recipe import toolchain
nvcc = toolchain.find_nvcc(None)
wanted = [targets.here(backends.for_device("cpu"))] + ([targets.named("sm_90", cuda_version=nvcc.version)] if nvcc else [])
found = {}
for op in map(registry.find, ("keytest::plus", "allreduce")):
    for target in wanted:
        if target.backend.name in op.backends():
            entry = request.entry(op, target)
            found[f"{op.qualified} {target}"] = [entry.key, hashlib.sha256(entry.library.read_bytes()).hexdigest(), str(entry.library)]
print(json.dumps(found))
"""


def build_all(
    op: Path, changes: dict[str, str | None], python: str = sys.executable, before: str = ""
) -> dict[str, list[str]]:
    """Key, hash and place of all binaries that a fresh process builds or finds, after some code of the test's."""
    found = json.loads(fresh(helpers.declare(op) + before + BUILD, changes, python=python).stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.torch
def test_the_environment_does_not_reach_into_a_binary(
    built_once: tuple[Path, Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CFLAGS": "-O0 -g",
        "CXXFLAGS": "-O0",
        "LDFLAGS": "-Wl,-rpath,/evil",
        "LD_RUN_PATH": "/evil",
        "LIBRARY_PATH": "/evil",
        "CPATH": str(tmp_path),
        "NVCC_APPEND_FLAGS": "-g",
        "TORCH_CUDA_ARCH_LIST": "7.5",
        "MAX_JOBS": "1",
        "LANG": "de_DE.UTF-8",
        "LC_ALL": "C.UTF-8",
        "NINJA_STATUS": "FAILED: ",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "CXX": "/no/such/c++",
        "SOURCE_DATE_EPOCH": "1",
    }.items():
        monkeypatch.setenv(name, value)
    other = built(write_op(tmp_path / "plus"), tmp_path / "cache")
    assert other.library.read_bytes() == built_once[1].library.read_bytes()
    assert not (tmp_path / "extensions").exists()


def test_a_binary_of_each_level_is_built_and_told_apart(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    contents = {
        built(op, tmp_path / "cache", targets.named(arch)).library.read_bytes()
        for arch in helpers.LEVELS
    }
    assert len(contents) >= 2


def test_a_binary_for_another_target_is_refused(built_once: tuple[Path, Entry]) -> None:
    content = built_once[1].library.read_bytes()
    with pytest.raises(EntryError, match=f"not {machine_of(helpers.FOREIGN)}"):
        check_library(content, targets.named(helpers.FOREIGN))
    with pytest.raises(EntryError, match="no arch, not for sm_90"):
        check_library(content, targets.named("sm_90", cuda_version="13.0"))
    with pytest.raises(EntryError, match=r"needs libevil_cpu\.so, which the op does not declare"):
        check_library(
            content.replace(b"libtorch_cpu.so\0", b"libevil_cpu.so\0\0"),
            targets.here(helpers.cpu()),
        )
    for runtime, reason in (
        ("12.8", "no arch, not for sm_90"),
        ("13.0", r"needs libcudart\.so\.12,"),
    ):  # that of the target, and another
        with pytest.raises(EntryError, match=reason):
            check_library(
                content.replace(b"libtorch_cpu.so\0", b"libcudart.so.12\0"),
                targets.named("sm_90", cuda_version=runtime),
            )


@pytest.mark.parametrize("tags", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_library_that_looks_for_others_beside_it_is_refused_and_can_lose_that(
    tmp_path: Path, tags: str
) -> None:
    """There somebody may have put a library."""
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    library = tmp_path / "one.so"
    subprocess.run(
        [
            helpers.real_compiler(),
            "-shared",
            "-fPIC",
            f"-Wl,{tags},-rpath,$ORIGIN:/evil",
            "-o",
            library,
            tmp_path / "one.c",
        ],
        check=True,
    )
    content = library.read_bytes()
    assert elf.inspect(content).run_path == "$ORIGIN:/evil"
    with pytest.raises(
        EntryError, match=r"has the RPATH '\$ORIGIN:/evil', where other users may put libraries"
    ):
        elf.check_elf(content, platform.machine(), cpu_backend.NEEDED, frozenset())
    library.write_bytes(elf.without_run_path(content))
    assert elf.inspect(library.read_bytes()) == elf.inspect(content)._replace(run_path=None)
    assert "(RPATH)" not in (text := readelf(library, "--dynamic"))
    assert "(RUNPATH)" not in text
    assert ctypes.CDLL(str(library)).one() == 1
    elf.check_elf(library.read_bytes(), platform.machine(), cpu_backend.NEEDED, frozenset())


# --- CUDA, without a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_80+sm_90", "sm_90a", "sm_100f"])
def test_the_command_leaves_a_good_cuda_entry_without_a_gpu(tmp_path: Path, arch: str) -> None:
    op = write_op(tmp_path / "plus")
    code = (
        helpers.declare(op)
        + f"from opjit.cli import main\nmain(['get', 'keytest::plus', '--arch', {arch!r}])"
    )
    library = Path(fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout.strip())
    nvcc = toolchain.require_nvcc(None)
    found = elf.inspect(library.read_bytes())
    assert found.cuda_archs == set(arch.split("+"))
    known = {
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libm.so.6",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
    assert found.needed - known == {*CUDA_NEEDED, f"libcudart.so.{nvcc.version.partition('.')[0]}"}
    assert found.run_path is None
    assert_clean(library.read_bytes(), tmp_path)
    target, _, _ = library.parent.parent.name.rpartition("-")
    assert target == f"{arch}.cuda{nvcc.version.partition('.')[0]}.{platform.machine()}"


ODD = [
    *(
        (f"{name}/plus", f"{name}/cache")
        for name in ("dol$lar", "smörgås-日本", "{brace} & semi;colon", "com,ma", "quo'te `tick`")
    ),
    *(("plus", name) for name in ("quo'te", 'dou"ble', "com,ma")),
]


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("op", "cache"),
    [
        ("with a space/plus", "with a space/cache"),
        ("plus", "back\\slash"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ODD),
    ],
)
def test_odd_characters_in_paths_do_no_harm_to_a_cuda_build(
    cuda_once: tuple[Path, Entry], tmp_path: Path, op: str, cache: str
) -> None:
    other = built(write_op(tmp_path / op), tmp_path / cache, cuda_target("sm_80+sm_90"))
    assert other.library.read_bytes() == cuda_once[1].library.read_bytes()


@pytest.mark.nvcc
def test_a_cuda_binary_holds_no_path_is_stripped_and_has_its_archs_by_cuobjdump(
    cuda_once: tuple[Path, Entry],
) -> None:
    assert_clean(cuda_once[1].library.read_bytes(), cuda_once[0])
    assert ".symtab" not in readelf(cuda_once[1].library, "--sections")
    tool = Path(toolchain.require_nvcc(None).root) / "bin" / "cuobjdump"
    if tool.exists():
        text = subprocess.run(
            [tool, "--list-elf", str(cuda_once[1].library)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert {name for name in ("sm_75", "sm_80", "sm_90", "sm_100") if f".{name}." in text} == {
            "sm_80",
            "sm_90",
        }


@pytest.mark.nvcc
def test_a_wrapper_script_around_nvcc_and_flags_in_the_environment_do_not_reach_into_a_binary(
    cuda_once: tuple[Path, Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(toolchain.require_nvcc(None).root) / "bin" / "nvcc"
    program(tmp_path / "bin" / "nvcc", f"#!/bin/sh\nexec '{real}' \"$@\"\n")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "NVCC_APPEND_FLAGS": "-DAMOUNT=7.0f -lineinfo",
        "NVCC_PREPEND_FLAGS": "-g",
        "TORCH_CUDA_ARCH_LIST": "7.5",
        "PYTORCH_NVCC": "/no/such/nvcc",
        "NVCC_CCBIN": "/no/such/gcc",
        "CUDA_INC_PATH": "/evil",
        "CC": helpers.real_compiler(),
    }.items():
        monkeypatch.setenv(name, value)
    assert Path(toolchain.require_nvcc(None).root, "bin", "nvcc").samefile(real)
    other = built(write_op(tmp_path / "plus"), tmp_path / "cache", cuda_target("sm_80+sm_90"))
    assert other.library.read_bytes() == cuda_once[1].library.read_bytes()


# --- another torch ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_python() -> str:
    if not OTHER:
        pytest.skip("OPJIT_TEST_OTHER_PYTHON does not name a Python with another torch")
    return OTHER


@pytest.mark.torch
def test_another_torch_builds_the_same_binaries_under_the_same_keys(
    other_python: str, tmp_path: Path
) -> None:
    op = write_op(tmp_path / "plus")
    versions = [
        fresh("import torch; print(torch.__version__)", python=python).stdout
        for python in (sys.executable, other_python)
    ]
    # Each torch brings an NVRTC of its own.
    by_nvcc = (
        "from opjit.recipe import toolchain\ntoolchain.find_nvrtc = lambda runtime, notes: None\n"
    )
    found = [
        build_all(op, {"OPJIT_CACHE": str(tmp_path / name)}, python, before=by_nvcc)
        for name, python in (("here", sys.executable), ("there", other_python))
    ]
    assert versions[0] != versions[1]
    assert found[0].keys() == found[1].keys()
    assert {name: one[:2] for name, one in found[0].items()} == {
        name: one[:2] for name, one in found[1].items()
    }


@pytest.mark.torch
def test_a_binary_built_here_is_a_hit_there_without_any_compiler(
    other_python: str, tmp_path: Path
) -> None:
    op = write_op(tmp_path / "plus")
    cache = tmp_path / "cache"
    build_all(op, {"OPJIT_CACHE": str(cache)})
    before = helpers.snapshot(cache)
    code = (
        helpers.declare(op)
        + """
warnings.simplefilter("error", opjit.errors.CacheWarning)
plus, allreduce = (opjit.get(name, "cpu") for name in ("keytest::plus", "allreduce"))
assert torch.equal(plus(torch.arange(5.0)), torch.arange(5.0) + 1)
for x in (torch.linspace(-1, 2, 10_001)[::3], torch.arange(9).reshape(3, 3).t(), torch.empty(0)):
    torch.testing.assert_close(allreduce(x), x.sum())
try:
    plus(torch.ones(1, dtype=torch.int64))
except RuntimeError as error:
    assert "plus takes float32, not int64" in str(error)
print("passed")
"""
    )
    changes = {**helpers.no_compiler(tmp_path), "OPJIT_CACHE": str(cache), "OPJIT_OFFLINE": "1"}
    assert fresh(code, changes, python=other_python).stdout == "passed\n"
    assert helpers.snapshot(cache) == before


CODE = """\
import hashlib, sys
from pathlib import Path
from tests import helpers
folder, cache, arch = sys.argv[1:]
target = helpers.cuda_target(arch) if arch else None
entry = helpers.built(Path(folder), Path(cache), target)
print(entry.key, hashlib.sha256(entry.library.read_bytes()).hexdigest())
"""


def elsewhere(
    folder: Path,
    cache: Path,
    arch: str,
    changes: dict[str, str | None],
    cwd: Path,
    mask: int = 0o022,
) -> str:
    """Key and digest of a build in another process."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), str(cache), arch],
        env=helpers.environment(changes),
        cwd=cwd,
        umask=mask,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["", pytest.param("sm_90", marks=pytest.mark.nvcc)], ids=["cpu", "cuda"]
)
def test_another_folder_home_place_mask_and_order_of_the_environment_make_the_same_bytes(
    tmp_path: Path, arch: str
) -> None:
    here = built(
        write_op(tmp_path / "plus"), tmp_path / "cache", cuda_target(arch) if arch else None
    )
    expected = f"{here.key} {hashlib.sha256(here.library.read_bytes()).hexdigest()}"
    for name, mask in (("a much longer name of a folder with blanks", 0o077), ("b", 0o000)):
        far = tmp_path / name
        (far / "tmp").mkdir(parents=True)
        folder = write_op(far / "deeper" / "still" / "plus")
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        changes: dict[str, str | None] = {
            "HOME": str(far),
            "TMPDIR": str(far / "tmp"),
            "USER": name,
            "LANG": "de_DE.UTF-8",
            "TZ": "Asia/Tokyo",
            "SOURCE_DATE_EPOCH": "1",
            "COLUMNS": "40",
            "CFLAGS": "-O0",
            "LDFLAGS": "-Wl,--build-id",
        }
        assert elsewhere(folder, far / "cache", arch, changes, cwd=far, mask=mask) == expected

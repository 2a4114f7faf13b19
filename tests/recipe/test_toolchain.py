"""The tools of a build: found where the user says, asked who they are, and missed with what to install."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from opjit.backends import targets
from opjit.builder import build
from opjit.errors import ToolMissing
from opjit.recipe import compilers, toolchain
from opjit.store.store import Store
from tests import helpers
from tests.helpers import built, fake_compiler, no_nvcc, no_nvrtc, program


def lacks(tool: str, says: str, work: Callable[[], object]) -> None:
    with pytest.raises(ToolMissing, match=says) as caught:
        work()
    assert caught.value.tool == tool


def test_a_missing_compiler_says_what_to_install(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    lacks(
        "cc",
        r"(?s)no C compiler.*apt install gcc.*OPJIT_CACHE",
        lambda: built(op, tmp_path / "cache"),
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["no-such", "/no/such/cc", "gcc -m32", "/"])
def test_a_cc_that_names_no_program_is_an_error_and_not_passed_over(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CC", name)
    lacks("cc", re.escape(f"CC is {name!r}"), lambda: built(op, tmp_path / "cache"))


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch's builder does not quote the compiler's path"
)
def test_a_cc_that_is_a_relative_path_works(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path / "my cc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./my cc")
    built(op, tmp_path / "cache")


@pytest.mark.parametrize(
    "said", ["sh\necho hello\n", "sh\nprintf '\\377\\376\\0Target: '\n", "no-interpreter\n"]
)
def test_a_compiler_or_an_nvcc_that_does_not_say_who_it_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    fake = program(tmp_path / "bin" / "nvcc", f"#!/bin/{said}")
    monkeypatch.setenv("CC", str(fake))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    lacks(
        "cc",
        re.escape(f"{fake} is not a working gcc or clang"),
        lambda: toolchain.require_compiler(None),
    )
    lacks("nvcc", re.escape(f"{fake} is not a working nvcc"), lambda: toolchain.require_nvcc(None))


def test_a_missing_nvcc_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: Path
) -> None:
    no_nvcc(monkeypatch)
    no_nvrtc(monkeypatch)
    recipe = helpers.describe(op, targets.named("sm_90", cuda_version="13.0"), compiler={})
    lacks(
        "nvcc",
        f"CUDA Toolkit.*{re.escape(toolchain.install_nvrtc())}",
        lambda: build.build(recipe, Store(tmp_path / "cache")),
    )


def installed(root: Path, release: str, parts: str = "nvrtc runtime") -> Path:
    """A root with parts of a release of CUDA."""
    major, minor = release.split(".")
    for folder in ("lib", "include/cccl"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    if "nvrtc" in parts:
        (root / f"lib/libnvrtc.so.{major}").touch()
        (root / f"lib/libnvrtc-builtins.so.{release}").touch()
    if "runtime" in parts:
        (root / f"lib/libcudart.so.{major}").touch()
        text = f"#define CUDART_VERSION  {int(major) * 1000 + int(minor) * 10}\n"
        (root / "include/cuda_runtime_api.h").write_text(text)
    return root


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with a CUDA Toolkit 13.0 without NVRTC, and a place for pip's packages."""
    toolkit = installed(tmp_path / "toolkit", "13.0", "runtime")
    nvcc = compilers.Nvcc(str(toolkit), "13.0", "V13.0.88")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda notes: nvcc)
    monkeypatch.setattr(toolchain, "cuda_wheels", lambda: [tmp_path / "nvidia"])
    toolchain.find_nvrtc.cache_clear()
    yield tmp_path
    toolchain.find_nvrtc.cache_clear()


@pytest.mark.parametrize(
    ("release", "of_toolkit"), [("13.2", []), ("13.0", ["toolkit/include", "toolkit/include/cccl"])]
)
def test_nvrtc_reads_the_headers_of_its_own_release_only(
    machine: Path, release: str, of_toolkit: list[str]
) -> None:
    installed(machine / "nvidia/cu13", release)
    found = toolchain.find_nvrtc("cuda13", None)
    assert found is not None
    own = ["nvidia/cu13/include", "nvidia/cu13/include/cccl"]
    assert found.headers == ":".join(str(machine / name) for name in own + of_toolkit)
    assert found.runtime == str(machine / "nvidia/cu13/lib")
    assert found.version.startswith(f"{release} ")


def test_a_toolkit_of_nvrtc_s_release_helps_where_pip_s_runtime_is_of_another(
    machine: Path,
) -> None:
    installed(machine / "nvidia/cu13", "13.2", "runtime")
    installed(machine / "nvidia/cu13", "13.0", "nvrtc")
    found = toolchain.find_nvrtc("cuda13", None)
    assert found is not None
    assert found.headers.partition(":")[0] == str(machine / "toolkit/include")


def test_the_packages_of_cuda_12_are_one_installation(machine: Path) -> None:
    installed(machine / "nvidia/cuda_nvrtc", "12.8", "nvrtc")
    installed(machine / "nvidia/cuda_runtime", "12.8", "runtime")
    installed(machine / "nvidia/cu13", "13.2")
    (machine / "nvidia/cuda_cccl/include/nv").mkdir(parents=True)
    found = toolchain.find_nvrtc("cuda12", None)
    assert found is not None
    first, *others = found.headers.split(":")
    assert first == str(machine / "nvidia/cuda_runtime/include")
    assert str(machine / "nvidia/cuda_cccl/include") in others
    assert not any("cu13" in folder or "toolkit" in folder for folder in others)
    assert found.version.startswith("12.8 ")
    toolkit = Path(found.as_toolkit(machine / "work"))
    assert (toolkit / "include/cuda_runtime_api.h").is_file()
    assert (toolkit / "include/nv").is_dir()
    assert (toolkit / "lib64/libcudart.so").resolve().name == "libcudart.so.12"


def test_the_nvcc_of_pip_s_packages_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        toolchain, "which", lambda name: name if os.sep in name and "/cu13/" in name else None
    )
    monkeypatch.setattr(toolchain, "cuda_wheels", lambda: [tmp_path / "nvidia"])
    (tmp_path / "nvidia/cu13/bin").mkdir(parents=True)
    helpers.fake_nvcc(tmp_path / "nvidia/cu13/bin/nvcc", "V13.2.86")
    found = toolchain.find_nvcc(None)
    assert found is not None
    assert (found.root, found.version) == (str(tmp_path / "nvidia/cu13"), "13.2")


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (
            "13.2",
            "install the CUDA Toolkit, or pip install 'nvidia-cuda-nvcc==13.2.*' 'nvidia-cuda-cccl==13.2.*'",
        ),
        ("12.8", "install the CUDA Toolkit"),
        (None, "install the CUDA Toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-cccl"),
    ],
)
def test_the_package_of_nvcc_is_that_of_torch_s_release(
    monkeypatch: pytest.MonkeyPatch, version: str | None, says: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert toolchain.install_nvcc() == says


@pytest.mark.parametrize(("version", "runtime"), [("12.8", "cuda12"), (None, "cuda13")])
def test_torch_s_cuda_decides_the_runtime_whatever_toolkit_is_there(
    machine: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, runtime: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert toolchain.target_of("sm_90", None).runtime == runtime
    nvcc = toolchain.nvcc_of(runtime, None)
    assert (nvcc is None) == (runtime == "cuda12")


def test_a_compiler_for_another_kind_of_machine_is_refused_in_a_sentence(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"#!/bin/sh\n'{helpers.real_compiler()}' \"$@\" 2>&1 | sed 's/^Target: .*/Target: riscv64-linux-gnu/'\n"
    monkeypatch.setenv("CC", str(program(tmp_path / "cc", other)))
    with pytest.raises(
        ToolMissing,
        match="target is riscv64-linux-gnu, but opjit builds for x86_64 and aarch64; set CC to another",
    ):
        built(op, tmp_path / "cache")


def test_a_compiler_that_is_a_script_is_the_same_one_behind_a_temporary_folder_with_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "own-cc")))
    found = set()
    for name in ("plain", "with a blank"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        found.add(toolchain.find_compiler(None))
    assert len(found) == 1


def test_a_compiler_that_is_still_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of another thread may have its file open for a moment. Without a compiler, the binary of any would match."""
    compiler = fake_compiler(tmp_path / "cc")
    monkeypatch.setenv("CC", str(compiler))
    with open(compiler, "ab") as writer:
        threading.Timer(0.2, writer.close).start()
        assert toolchain.require_compiler(None).path == str(compiler)

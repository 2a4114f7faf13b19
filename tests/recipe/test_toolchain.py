"""The tools of a build: found where the user says, asked who they are, and missed with what to install."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from opjit.backends import targets
from opjit.builder import build
from opjit.errors import ToolMissing
from opjit.recipe import toolchain
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
        f"CUDA Toolkit.*{toolchain.INSTALL_NVRTC}",
        lambda: build.build(recipe, Store(tmp_path / "cache")),
    )


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

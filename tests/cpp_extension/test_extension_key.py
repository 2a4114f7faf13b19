"""An extension's key, and builds of one that must not be stored under it."""

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension as torchs

import opjit
from opjit import backends
from opjit.builder import torch_builder
from opjit.cpp_extension import identity
from opjit.cpp_extension.arguments import LoadCall
from opjit.cpp_extension.identity import Extension
from opjit.errors import BuildError
from tests import helpers
from tests.helpers import LIES, OUTPUT, UNREADABLE, as_root, program, tmpfs, write_cxx

EXTENSION = 'extern "C" int value() { return 5; }\n'


def load(path: str, *flags: str, name: str = "faults_extension") -> str:
    found = opjit.load(name, path, extra_cflags=list(flags), is_python_module=False)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("lie", ["missing", "text"])
def test_a_cxx_compiler_that_lies_is_named_and_nothing_is_published(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    links = 'case " $* " in *" -shared "*) true;; *) false;; esac'
    fake = program(
        tmp_path / "bin" / "c++",
        f"#!/bin/sh\n'{shutil.which('c++')}' \"$@\"\ncode=$?\n"
        f"if {links}; then {OUTPUT}; {LIES[lie]}; code=0; fi\nexit $code\n",
    )
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(BuildError, match="reported success") as refused:
        load(write_cxx(tmp_path / "source", EXTENSION))
    assert str(fake) in str(refused.value)
    assert helpers.entries(here) == []


def test_another_build_of_torch_is_another_extension_and_the_old_one_is_not_loaded(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_cxx(tmp_path / "source", EXTENSION)
    changes: list[tuple[Any, str, object]] = [
        (torch, "__version__", "2.13.0+cu124"),
        (torch, "__version__", "2.13.0+cu121"),
        (torch, "__version__", "2.13.1"),
        (torch.version, "git_version", "0" * 40),
        (torch.version, "cuda", "12.1"),
        (torch._C, "_GLIBCXX_USE_CXX11_ABI", not torch._C._GLIBCXX_USE_CXX11_ABI),
    ]
    first = load(path)
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    shelves = set()
    for owner, name, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            with pytest.raises(BuildError, match="is not cached"):
                load(path)
            shelves.add(here / described(path).place_of_entries)
    assert len(shelves) == len(changes)
    assert load(path) == first


def described(path: str | list[str], *flags: str, with_cuda: bool | None = None) -> Extension:
    call = LoadCall(
        name="faults_extension",
        sources=path,
        extra_cflags=list(flags),
        with_cuda=with_cuda,
        is_python_module=False,
    )
    return identity.describe(call, None)


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("-DF=$NAME.", "-DF=."),
        ("-DF=${NAME}.", "-DF=."),
        ("-DF=$$NAME.", "-DF=value."),
        ("-DF='$$NAME.'", "-DF=$NAME."),
        ("-DF=$$(echo 1)", "-DF=1"),
    ],
)
def test_ninja_expands_a_flag_before_the_shell_does(
    monkeypatch: pytest.MonkeyPatch, flag: str, word: str
) -> None:
    monkeypatch.setenv("NAME", "value")
    call = LoadCall(name="faults_extension", sources="a.cpp", extra_cflags=[flag])
    assert identity.expanded(call).extra_cflags == [torch_builder.quote(word)]


def test_a_flag_that_expands_to_nothing_disappears() -> None:
    call = LoadCall(name="faults_extension", sources="a.cpp", extra_cflags=["$OPJIT_NO_SUCH"])
    assert identity.expanded(call).extra_cflags == []


@pytest.mark.parametrize("flag", ["$cxx", "-DF=${cflags}"])
def test_a_flag_with_a_variable_of_torchs_ninja_file_is_left_to_torch(flag: str) -> None:
    call = LoadCall(name="faults_extension", sources="a.cpp", extra_cflags=[flag])
    with pytest.raises(identity.Unsupported):
        identity.expanded(call)


def test_the_order_of_sources_is_not_in_the_key(tmp_path: Path) -> None:
    paths = [write_cxx(tmp_path / folder, EXTENSION) for folder in ("one", "other")]
    assert described(paths).key == described(paths[::-1]).key


def test_what_a_user_changes_of_torchs_cuda_commands_is_in_the_key_and_reaches_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_cxx(tmp_path, EXTENSION)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    bases = [described(path, with_cuda=True).base]
    monkeypatch.setattr(torchs, "COMMON_NVCC_FLAGS", torchs.COMMON_NVCC_FLAGS[1:])
    bases.append(described(path, with_cuda=True).base)
    assert (
        torch_builder.settings()["COMMON_NVCC_FLAGS"]
        == torchs.COMMON_NVCC_FLAGS
        != torch_builder.private_copy().COMMON_NVCC_FLAGS
    )
    monkeypatch.setenv("PYTORCH_NVCC", "ccache nvcc")
    bases.append(described(path, with_cuda=True).base)
    assert len(set(bases)) == 3
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert described(path, with_cuda=True).base == bases[0]


@pytest.mark.no_qemu("a cross compiler has no -march=native")
def test_native_stands_for_the_cpu_at_hand(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_cxx(tmp_path / "source", EXTENSION)
    first = load(path, "-march=native")
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    plain = described(path).key
    with monkeypatch.context() as patched:
        patched.setattr(backends.cpu, "identity", lambda: "another CPU")
        with pytest.raises(BuildError, match="is not cached"):
            load(path, "-march=native")
        assert described(path).key == plain, "without the flag the CPU is nobody's business"
    assert load(path, "-march=native") == first


def test_each_field_of_an_extension_flips_the_key(tmp_path: Path) -> None:
    one = described(write_cxx(tmp_path / "source", EXTENSION), "-DVALUE=1")
    changed = {
        "name": replace(one, name="another"),
        "sources": replace(one, sources=(*one.sources, str(tmp_path / "source" / "more.cpp"))),
        "inline": replace(one, inline={"cpp_sources": ["0" * 64]}),
        "flags": replace(one, flags={**one.flags, "c": ["-DVALUE=2"]}),
        "archs": replace(one, archs="9.0"),
        "known": replace(one, known={**one.known, "plain.cpp": "0" * 64}),
        "toolchain": replace(one, toolchain={**(one.toolchain or {}), "cxx.version": "?"}),
        "light": replace(one, light="0"),
        "stable": replace(one, stable="2.10"),
    }
    # The content of these is in other fields; `reason` is for people, and code and compilers decide `pybind11`.
    elsewhere = {
        "texts",
        "places",
        "doubt",
        "include",
        "light_toolchains",
        "reason",
        "pybind11",
        "only_listed",
    }
    assert changed.keys() == {each.name for each in fields(Extension)} - elsewhere
    assert len({one.key, *(another.key for another in changed.values())}) == len(changed) + 1


def test_a_header_that_cannot_be_read_and_that_no_compiler_reads_does_not_matter(
    here: Path, tmp_path: Path
) -> None:
    path = write_cxx(tmp_path / "source", f'#if 0\n#include "broken.h"\n#endif\n{EXTENSION}')
    (tmp_path / "source" / "broken.h").symlink_to(UNREADABLE)
    assert Path(load(path)).is_relative_to(here)


@as_root
@helpers.no_exec
def test_an_extension_in_a_noexec_cache_is_an_error_that_names_the_way_out(
    here: Path, tmp_path: Path
) -> None:
    here.mkdir(mode=0o700)
    with tmpfs(here, "noexec"):
        with pytest.raises((ImportError, OSError), match="noexec, set OPJIT_CACHE"):
            load(write_cxx(tmp_path / "source", EXTENSION))
        assert len(helpers.entries(here)) == 1

"""opjit.build: any project's sources become a shared library of the cache, by content alone and without torch."""

import ctypes
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opjit
from opjit.ahead.record import record
from opjit.cache import transfer
from opjit.cpp_extension.entries import entries
from opjit.declare import oplist
from opjit.declare.oplist import RecordedExtension
from opjit.errors import BuildError, CompileError, OpjitError, ToolMissing, UnknownArch
from opjit.recipe import toolchain
from opjit.store import elf, manifest
from opjit.store.store import Store
from tests.helpers import fresh, no_compiler, program, started

ADDER = {
    "adder.c": '#include "k.h"\nint add(int a, int b) { return a + b + K; }\n',
    "k.h": "#define K 0\n",
}
KERNEL = '__global__ void fill(float *x) { x[threadIdx.x] = 1; }\nextern "C" void run(float *x) { fill<<<1, 32>>>(x); }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).add(2, 3))


def project(folder: Path) -> list[Path]:
    """A C++ and a C source over a header beside them, and one on the include path."""
    (folder / "include").mkdir(parents=True)
    (folder / "include/one.h").write_text("#define ONE 1\n")
    (folder / "two.h").write_text("#define TWO 2\n")
    (folder / "add.cpp").write_text(
        '#include <one.h>\nextern "C" int base(void);\n'
        'extern "C" int add(int a, int b) { return a + b + ONE + base(); }\n'
        'extern "C" const char *where() { return __FILE__; }\n'
    )
    (folder / "base.c").write_text('#include "two.h"\nint base(void) { return TWO; }\n')
    return [folder / "add.cpp", folder / "base.c"]


def document(path: Path) -> dict[str, object]:
    return manifest.parse((path.parent / manifest.NAME).read_bytes()).document


def test_torch_is_never_imported_and_nothing_for_builds_where_it_is_built(own_cache: Path) -> None:
    for_builds = {"logging", "subprocess", "concurrent.futures"}
    if sys.version_info < (3, 11):
        for_builds.remove("subprocess")  # Python's platform imports it there
    for origin, absent in (
        ("built", {"torch"}),
        ("is built already", {"torch", *for_builds}),
    ):
        done = fresh(
            f"import ctypes, sys, opjit\npath = opjit.build('adder', generated={ADDER!r})\n"
            f"assert ctypes.CDLL(str(path)).add(2, 3) == 5 and not {absent} & sys.modules.keys(), sys.modules.keys()",
            {"OPJIT_VERBOSE": "1", "OPJIT_CACHE": str(own_cache)},
            cold=True,
        )
        assert origin in done.stderr


def test_c_and_cpp_files_are_one_library_and_the_same_from_another_folder(tmp_path: Path) -> None:
    first = opjit.build("adder", project(tmp_path / "a"), include=[tmp_path / "a/include"])
    assert add(first) == 8
    assert (
        opjit.build("adder", project(tmp_path / "b/c"), include=[tmp_path / "b/c/include"]) == first
    )
    assert str(tmp_path).encode() not in first.read_bytes()


def test_a_key_has_content_and_no_torch_python_or_path(tmp_path: Path) -> None:
    found = document(opjit.build("adder", project(tmp_path), include=[tmp_path / "include"]))
    assert found.keys() == {
        "format",
        "made_by",
        "name",
        "host",
        "sources",
        "inline",
        "flags",
        "archs",
        "inputs",
        "toolchain",
        "known",
        "absent",
    }
    names = {part: list(found[part]) for part in ("inputs", "known")}  # type: ignore[call-overload]
    text = json.dumps({**found, **names})
    assert not any(word in text for word in ("torch", "ython", str(tmp_path), sys.prefix))
    assert found["known"].keys() == {"add.cpp", "base.c"}  # type: ignore[attr-defined]
    of_project = [name for name in found["inputs"] if not name.startswith("<")]  # type: ignore[attr-defined]
    assert sorted(of_project) == ["include/one.h", "two.h"]


def test_an_edit_of_a_header_a_flag_and_an_archive_is_another_library(tmp_path: Path) -> None:
    sources = project(tmp_path)
    include = [tmp_path / "include"]
    first = opjit.build("adder", sources, include=include)
    (tmp_path / "include/one.h").write_text("#define ONE 10\n")
    second = opjit.build("adder", sources, include=include)
    assert (add(first), add(second)) == (8, 17)
    assert (
        len(
            {
                first,
                second,
                opjit.build("adder", sources, include=include, cflags=["-DX"]),
                opjit.build("adder", sources, include=include, ldflags=["-Wl,-z,now"]),
            }
        )
        == 4
    )


def test_a_header_that_only_the_compiler_finds_is_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "hidden.h").write_text("#define K 1\n")
    source = tmp_path / "macro.c"
    source.write_text(
        '#define NAME "hidden.h"\n#include NAME\nint add(int a, int b) { return a + b + K; }\n'
    )
    first = opjit.build("macro", [source])
    assert opjit.build("macro", [source]) == first
    (tmp_path / "hidden.h").write_text("#define K 2\n")
    assert (add(first), add(opjit.build("macro", [source]))) == (6, 7)


def test_a_mistake_is_reported_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.c").write_text("int add(int a, int b)\n{\n    return a + c;\n}\n")
    with pytest.raises(CompileError, match=rf"^{tmp_path}/bad\.c:3:16: error: .c. undeclared"):
        opjit.build("bad", [tmp_path / "bad.c"])
    with pytest.raises(CompileError, match=r"^sub/bad\.c:1:1: error: "):
        opjit.build("bad", generated={"sub/bad.c": "nonsense x;\n"})


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        ({}, BuildError, "expected sources; name one or more files"),
        ({"generated": {"k.h": ""}}, BuildError, "expected sources; name one or more files"),
        (
            {"sources": ["x.f90"]},
            BuildError,
            "x.f90 has the suffix of no source; expected one of .c ",
        ),
        ({"sources": ["absent.c"]}, BuildError, "there is no source /.*absent.c"),
        ({"sources": "x.c"}, BuildError, "sources is one string"),
        (
            {"sources": ["n\nl.c"]},
            BuildError,
            r"its source, '/.*n\\nl\.c', has a control character",
        ),
        ({"generated": ADDER, "cflags": "-O3"}, BuildError, "cflags is one string"),
        ({"generated": {"../x.c": ""}}, BuildError, "cannot be the name of a generated file"),
        (
            {"generated": ADDER, "cflags": ["-fplugin=x.so"]},
            BuildError,
            "-fplugin=x.so brings in a plug-in",
        ),
        (
            {"generated": {"x.cu": KERNEL}, "archs": ["9.0a", "hopper"]},
            UnknownArch,
            "unknown CUDA arch 'hopper'",
        ),
        ({"generated": {"x.cu": KERNEL}}, UnknownArch, "it has CUDA code but no arch"),
        (
            {"generated": ADDER, "launcher": ["no-such-cache"]},
            ToolMissing,
            "no launcher no-such-cache",
        ),
    ],
)
def test_bad_input_gets_one_clear_message(
    call: dict[str, object], kind: type[OpjitError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPJIT_ARCH", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pytest.raises(kind, match=text):
        opjit.build("bad", **call)  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="expected a name"):
        opjit.build("../bad", generated=ADDER)


def test_a_missing_compiler_is_named_with_its_package(tmp_path: Path) -> None:
    fresh(
        f"""
        import opjit
        try:
            opjit.build("adder", generated={ADDER!r})
        except opjit.errors.ToolMissing as error:
            assert "apt install gcc" in str(error), error
        else:
            raise AssertionError
        """,
        {**no_compiler(tmp_path), "OPJIT_CACHE": str(tmp_path / "other")},
    )


def test_two_processes_build_once(tmp_path: Path, own_cache: Path) -> None:
    code = f"import opjit; print(opjit.build('adder', generated={ADDER!r}))"  # each waits for the other
    both = [started(code, {"OPJIT_CACHE": str(own_cache), "OPJIT_VERBOSE": "1"}) for _ in range(2)]
    paths, logs = zip(*(process.communicate(timeout=240) for process in both), strict=True)
    assert len({*paths}) == 1
    assert "".join(logs).count("built adder") == 1


def test_offline_builds_nothing_and_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = opjit.build("adder", generated=ADDER)
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    assert opjit.build("adder", generated=ADDER) == path
    with pytest.raises(
        BuildError,
        match=r"adder for .* is not cached, and OPJIT_OFFLINE forbids building or downloading it",
    ):
        opjit.build("adder", generated={**ADDER, "k.h": "#define K 5\n"})


def test_a_layer_serves_it(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = opjit.build("adder", generated=ADDER)
    monkeypatch.setenv("OPJIT_LAYERS", str(own_cache))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "empty"))
    assert opjit.build("adder", generated=ADDER) == path


def test_a_damaged_library_is_built_again() -> None:
    path = opjit.build("adder", generated=ADDER)
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content[:-1] + b"x")
    with pytest.warns(opjit.errors.CacheWarning, match="SHA-256"):
        assert opjit.build("adder", generated=ADDER).read_bytes() == content


def test_a_launcher_gets_each_compilation_and_only_a_script_is_in_the_key(
    tmp_path: Path, own_cache: Path
) -> None:
    seen = tmp_path / "seen"
    launcher = program(tmp_path / "launcher", f'#!/bin/sh\necho "$@" >> {seen}\nexec "$@"\n')
    path = opjit.build(
        "adder", project(tmp_path / "a"), include=[tmp_path / "a/include"], launcher=[str(launcher)]
    )
    assert len(seen.read_text().splitlines()) == 2
    second = project(tmp_path / "b")
    include = [tmp_path / "b/include"]
    plain = opjit.build("adder", second, include=include)
    assert plain != path
    assert opjit.build("adder", second, include=include, launcher=["env"]) == plain


def test_compile_commands_compile(tmp_path: Path) -> None:
    place = tmp_path / "build/compile_commands.json"
    opjit.build("adder", generated=ADDER, compile_commands=place)
    [command] = json.loads(place.read_text())
    assert Path(command["file"]).read_text() == ADDER["adder.c"]
    subprocess.run(command["arguments"], cwd=command["directory"], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ccache") is None, reason="ccache is not installed")
@pytest.mark.parametrize("by", ["build", "load"])
def test_an_edit_of_one_of_three_sources_recompiles_one_behind_ccache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, own_cache: Path
) -> None:
    sources = [tmp_path / f"{name}.cpp" for name in "abc"]
    for path in sources:
        path.write_text(f'#include "k.h"\nextern "C" int {path.stem}() {{ return K; }}\n')
    (tmp_path / "k.h").write_text("#define K 7\n")
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "ccache"))

    def compiled() -> int:
        """Build without kept objects, and return how many sources ccache did not know."""
        shutil.rmtree(own_cache / "v2/objects", ignore_errors=True)
        made = (
            opjit.build("abc", sources)
            if by == "build"
            else opjit.load("abc", [*map(str, sources)], is_python_module=False)
        )
        assert ctypes.CDLL(str(made)).a() == 7
        done = subprocess.run(
            ["ccache", "--print-stats"], check=True, capture_output=True, text=True
        )
        subprocess.run(["ccache", "--zero-stats"], check=True, capture_output=True)
        return int(dict(line.split("\t") for line in done.stdout.splitlines())["cache_miss"])

    monkeypatch.setenv("CXX", "ccache c++")
    monkeypatch.setenv("CC", "ccache gcc")
    assert compiled() == 3
    sources[1].write_text(sources[1].read_text() + "int more;\n")
    assert compiled() == 1
    monkeypatch.setenv("CXX", "c++")
    assert compiled() == 0, "the launcher is in the key"


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("int cuInit(unsigned flags); int init() { return cuInit(0); }", {"libcuda.so.1"}),
        ("int init() { return 0; }", set()),
    ],
)
def test_the_driver_s_library_is_linked_where_it_is_used_and_no_gpu_is(
    code: str, needed: set[str]
) -> None:
    path = opjit.build(
        "driver", generated={"driver.c": code}, ldflags=["-Wl,--as-needed", "-lcuda"]
    )
    assert {name for name in elf.inspect(path.read_bytes()).needed if "cuda" in name} == needed


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.skipif(
    not any(toolchain.cuda_wheels()), reason="pip's CUDA libraries are not installed"
)
def test_a_cuda_library_of_pip_is_linked_where_the_toolkit_lacks_it() -> None:
    [include] = [
        path
        for wheel in toolchain.cuda_wheels()
        for path in wheel.glob("*/include")
        if (path / "cublas_v2.h").is_file()
    ]
    code = (
        KERNEL
        + '#include <cublas_v2.h>\nextern "C" int version(int *to) { return cublasGetVersion(0, to); }\n'
    )
    path = opjit.build(
        "blas", generated={"blas.cu": code}, include=[include], archs=["9.0"], ldflags=["-lcublas"]
    )
    assert any(
        re.fullmatch(r"libcublas\.so\.\d+", name) for name in elf.inspect(path.read_bytes()).needed
    )


@pytest.mark.nvcc
@pytest.mark.slow
def test_cuda_is_built_for_each_arch_without_a_gpu_and_linked_for_the_device() -> None:
    path = opjit.build("fill", generated={"fill.cu": KERNEL}, archs=["9.0a", "8.0+PTX"])
    assert elf.inspect(path.read_bytes()).cuda_archs == {"sm_90a", "sm_80"}
    parts = {
        "a.cu": "__device__ float one();\n__global__ void fill(float *x) { *x = one(); }\n",
        "b.cu": "__device__ float one() { return 1; }\n",
    }
    linked = opjit.build("parts", generated=parts, archs=["sm_90"], cuda_cflags=["-rdc=true"])
    assert "sm_90" in elf.inspect(linked.read_bytes()).cuda_archs
    with pytest.raises(UnknownArch, match="nvcc does not support compute_95"):
        opjit.build("fill", generated={"fill.cu": KERNEL}, archs=["9.5"])
    with pytest.raises(CompileError, match=r"^fill\.cu\(1\): error: "):
        opjit.build("fill", generated={"fill.cu": "nonsense\n"}, archs=["9.0"])


def test_a_recorded_library_is_precompiled_and_explained(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = project(tmp_path / "a")
    listed = tmp_path / "list.json"
    (tmp_path / "use.py").write_text(
        f"import opjit\nopjit.build('adder', [{str(sources[0])!r}, {str(sources[1])!r}],\n"
        f"            include=[{str(tmp_path / 'a/include')!r}], generated={{'k.h': ''}})\n"
    )
    assert record([sys.executable, str(tmp_path / "use.py")], listed) == 0
    [recorded] = json.loads(listed.read_text())["extensions"]
    assert (recorded["function"], recorded["arguments"]["sources"]) == (
        "build",
        ["a/add.cpp", "a/base.c"],
    )
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "fresh"))
    assert opjit.precompile(recorded=listed).built == []
    report = opjit.precompile(recorded=listed, extensions=True)
    assert [str(each) for each in report.built] == [f"adder for {platform.machine()}"]
    assert opjit.check_precompiled(listed, extensions=True) == 1
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    assert (
        add(opjit.build("adder", sources, include=[tmp_path / "a/include"], generated={"k.h": ""}))
        == 8
    )
    [explained] = entries("adder", Store(tmp_path / "fresh"))
    assert f"for any program on {platform.machine()}" in str(explained)


def test_a_list_names_no_file_that_another_user_can_write_and_no_program(tmp_path: Path) -> None:
    sources = project(tmp_path / "a")
    sources[1].chmod(0o666)
    given: dict[str, Any] = {
        "name": "adder",
        "sources": [str(path) for path in sources],
        "include": [str(tmp_path / "a/include")],
        "generated": {},
        "cflags": [],
        "cuda_cflags": [],
        "ldflags": [],
    }
    (tmp_path / "list.json").write_text(
        oplist.dump_list([], [RecordedExtension("build", given, None)])
    )
    with pytest.raises(
        opjit.errors.PrecompileError,
        match=r"refusing to build the shared library .* from files that only the list names: .*base\.c",
    ):
        opjit.precompile(recorded=tmp_path / "list.json", extensions=True)
    (tmp_path / "list.json").write_text(
        oplist.dump_list([], [RecordedExtension("build", {**given, "launcher": ["true"]}, None)])
    )
    with pytest.raises(
        opjit.errors.PrecompileError, match=r"opjit\.build does not have its arguments"
    ):
        opjit.precompile(recorded=tmp_path / "list.json", extensions=True)


def test_a_header_that_another_user_can_write_keeps_a_listed_library_out_of_the_cache(
    tmp_path: Path, own_cache: Path
) -> None:
    header = tmp_path / "theirs.h"
    header.write_text("#define AMOUNT 2\n")
    header.chmod(0o666)
    (tmp_path / "one.c").write_text('#include "theirs.h"\nint amount(void) { return AMOUNT; }\n')
    given: dict[str, Any] = {"name": "one", "sources": [str(tmp_path / "one.c")]}
    given |= {"include": [], "generated": {}}
    flags: dict[str, list[str]] = {"cflags": [], "cuda_cflags": [], "ldflags": []}
    listed = tmp_path / "list.json"
    listed.write_text(oplist.dump_list([], [RecordedExtension("build", {**given, **flags}, None)]))
    refusal = rf"from files that only the list names: {header} can be written by other users"
    with pytest.raises(opjit.errors.PrecompileError, match=refusal):
        opjit.precompile(recorded=listed, extensions=True)
    assert not list(own_cache.glob("v2/shared_library.one/*/*"))
    header.chmod(0o644)
    assert len(opjit.precompile(recorded=listed, extensions=True).built) == 1


@pytest.mark.filterwarnings("ignore:OPJIT_TRUST=unsigned")
def test_a_remote_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = opjit.build("adder", generated=ADDER)
    remote = (tmp_path / "remote").as_uri()
    (tmp_path / "remote").mkdir()
    transfer.push(remote, sign=None)
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("OPJIT_REMOTE", remote)
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    with caplog.at_level("INFO", "opjit"):
        assert opjit.build("adder", generated=ADDER).read_bytes() == path.read_bytes()
    assert "came from the remote" in caplog.text

"""Kept object files: which sources a build compiles, and that nobody can tell from its binary."""

import ctypes
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import opjit
from opjit import cache
from opjit.errors import CompileError
from opjit.store import inventory, prune
from opjit.store.store import Store
from tests.helpers import program

SOURCES = {
    "a.cpp": '#include "both.h"\nint b(), c(); extern "C" int sum() { return BOTH + b() + c(); }\n',
    "b.cpp": '#include "both.h"\nint b() { return 10 * BOTH; } extern "C" const char *file() { return __FILE__; }\n',
    "c.cpp": '#define NAME "hidden.h"\n#include NAME\nint c() { return 100 * HIDDEN; }\n',
    "second/both.h": "#define BOTH 1\n",
    "hidden.h": "#define HIDDEN 1\n",
}


@pytest.fixture
def project(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three sources; CXX lists those that it compiles in its file ``compiled``."""
    folder = tmp_path / "project"
    for name, text in SOURCES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "first").mkdir()
    compiler = f"""#!/bin/sh
    for word in "$@"; do case "$word" in {folder}/?.cpp) basename "$word" >> {folder}/compiled; esac; done
    exec {shutil.which("c++")} "$@"
    """
    monkeypatch.setenv("CXX", str(program(tmp_path / "bin/c++", compiler)))
    return folder


@pytest.fixture(params=["build", "load"])
def made(project: Path, request: pytest.FixtureRequest) -> Callable[[], Path]:
    """Make the library by either function, with debug information, and return its path."""
    sources = [str(project / name) for name in ("a.cpp", "b.cpp", "c.cpp")]
    include = [str(project / "first"), str(project / "second")]

    def make() -> Path:
        if request.param == "build":
            return opjit.build("kept", sources, include=include, cflags=["-g"])
        return Path(
            str(
                opjit.load(
                    "kept",
                    sources,
                    extra_include_paths=include,
                    extra_cflags=["-g"],
                    is_python_module=False,
                    fast=False,
                )
            )
        )

    return make


def compiled(project: Path) -> list[str]:
    """The sources that were compiled since the last call."""
    found = (
        sorted((project / "compiled").read_text().split())
        if (project / "compiled").exists()
        else []
    )
    (project / "compiled").unlink(missing_ok=True)
    return found


def sum_of(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).sum())


def test_an_edit_compiles_what_it_changes_and_no_other_source(
    made: Callable[[], Path], project: Path
) -> None:
    assert (sum_of(made()), compiled(project)) == (111, ["a.cpp", "b.cpp", "c.cpp"])
    (project / "b.cpp").write_text(SOURCES["b.cpp"].replace("10 *", "20 *"))
    assert (sum_of(made()), compiled(project)) == (121, ["b.cpp"])
    (project / "second/both.h").write_text("#define BOTH 2\n")
    assert (sum_of(made()), compiled(project)) == (142, ["a.cpp", "b.cpp"])
    (project / "hidden.h").write_text("#define HIDDEN 3\n")
    assert (sum_of(made()), compiled(project)) == (342, ["c.cpp"]), (
        "only the compiler finds hidden.h"
    )
    (project / "first/both.h").write_text("#define BOTH 4\n")
    assert (sum_of(made()), compiled(project)) == (384, ["a.cpp", "b.cpp"]), (
        "it is earlier on the include path"
    )


def test_what_compiled_is_kept_where_another_source_has_a_mistake(
    made: Callable[[], Path], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", "1")
    (project / "c.cpp").write_text("int c() { return d; }\n")
    with pytest.raises(CompileError):
        made()
    assert compiled(project) == ["a.cpp", "b.cpp", "c.cpp"]
    (project / "c.cpp").write_text("int c() { return 100; }\n")
    assert (sum_of(made()), compiled(project)) == (111, ["c.cpp"])


def test_the_binary_is_that_of_a_build_without_kept_objects(
    made: Callable[[], Path], project: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made()
    (project / "c.cpp").write_text("int c() { return 0; }\n")
    kept = made().read_bytes()
    assert compiled(project) == ["a.cpp", "b.cpp", "c.cpp", "c.cpp"]
    monkeypatch.setenv("OPJIT_CACHE", f"{here}-other")
    assert made().read_bytes() == kept
    assert compiled(project) == ["a.cpp", "b.cpp", "c.cpp"]


def test_damaged_objects_are_compiled_again_and_pruning_takes_objects_first(
    made: Callable[[], Path], project: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made()
    shutil.rmtree(first.parents[1])
    for path in (here / "v2/parts").glob("*/object.o"):
        path.write_bytes(path.read_bytes()[:-1])
    compiled(project)
    entry = made()
    assert compiled(project) == ["a.cpp", "b.cpp", "c.cpp"]
    now = time.time() + 7200
    monkeypatch.setattr(prune, "time", SimpleNamespace(time=lambda: now))
    done = cache.prune(size=sum(item.size for item in cache.entries()))
    assert (done.removed, inventory.parts(Store(here)), entry.is_file()) == (0, [], True)

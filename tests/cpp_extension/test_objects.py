"""The object files that the cache keeps: which sources a build compiles, and that nobody can tell from its binary."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import opjit
from opjit import cache, files
from opjit.cpp_extension import compiler_launcher, objects
from opjit.errors import BuildError, CompileError
from opjit.store.entry import Entry, verify
from tests import helpers
from tests.helpers import DAY, cache_command, environment, fresh, program

ALL = ["s0", "s1", "s2", "s3", "s4"]


class Project:
    """Five sources, ``s0.cpp`` to ``s4.cpp``: s1 and s2 include ``both.h``, and s3 includes ``hidden.h`` through a macro.

    Attributes:
        values: what the sources' functions return, added up.
        flags: for the compiler.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.log = folder / "compiled"
        self.flags = ["-DFLAG=1"]
        for path in ("both.h", "hidden.h"):
            self.write(path, f"#define VALUE_{path[0]} 1\n")
        self.write("s1.cpp", '#include "both.h"\nint f1() { return 10 * VALUE_b; }\n')
        self.write("s2.cpp", '#include "both.h"\nint f2() { return 100 * VALUE_b; }\n')
        self.write("s3.cpp", '#define TEXT(name) #name\n#include TEXT(hidden.h)\nint f3() { return 1000 * VALUE_h; }\n')
        self.write("s4.cpp", "int f4() { return 10000 * FLAG; }\n")
        self.write("s0.cpp", 'int f1(), f2(), f3(), f4();\nextern "C" int sum() { return 1 + f1() + f2() + f3() + f4(); }\n')

    def write(self, path: str, text: str) -> None:
        (self.folder / path).write_text(text)

    def edit(self, path: str) -> None:
        with (self.folder / path).open("a") as file:
            file.write("// edited\n")

    @property
    def sources(self) -> list[str]:
        return [str(self.folder / f"{name}.cpp") for name in ALL]

    def cxx(self, more: str = "") -> str:
        """A c++ that notes each source that it compiles, and takes more flags."""
        text = f"""#!/bin/sh
        case " $* " in *" -c "*)
            for word in "$@"; do case $word in *.cpp) name=$(basename "$word" .cpp);; esac; done
            echo "$name" >> '{self.log}'
            if [ -e '{self.folder}/before' ]; then . '{self.folder}/before'; fi
        esac
        exec '{shutil.which("c++")}' "$@" {more}
        """
        return str(program(self.folder / "bin" / "c++", text))

    def before(self, commands: str) -> None:
        """Have the c++ run shell commands before it compiles; in them ``$name`` is the source's."""
        self.write("before", commands)

    def load(self, link: str = "") -> str:
        found = opjit.load(self.name, self.sources, extra_cflags=self.flags, extra_ldflags=[link] if link else None, is_python_module=False)
        assert isinstance(found, str)
        return found

    def sum(self) -> int:
        return int(ctypes.CDLL(self.load()).sum())

    def compiled(self) -> list[str]:
        """The sources that were compiled since the last call."""
        found = sorted(self.log.read_text().split()) if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def project(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    (tmp_path / "project").mkdir()
    made = Project(tmp_path / "project", f"objects_{os.urandom(4).hex()}")
    monkeypatch.setenv("CXX", made.cxx())
    return made


@pytest.fixture
def built(project: Project) -> Project:
    """The same, built once."""
    assert project.sum() == 11111
    assert project.compiled() == ALL
    return project


def kept(root: Path) -> list[Path]:
    return sorted((root / "v1" / "objects").iterdir())


def plain_build(project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an entry that was built without any kept object, in another cache."""
    with monkeypatch.context() as patch:
        patch.setenv("OPJIT_CACHE", str(root))
        patch.setattr(objects, "_is_understood", lambda name, text: False)
        return Path(project.load()).parent


@pytest.mark.torch
def test_an_edit_of_one_of_five_sources_compiles_that_one(built: Project) -> None:
    built.write("s4.cpp", "int f4() { return 20000; }\n")
    assert built.sum() == 21111
    assert built.compiled() == ["s4"]


def test_an_edited_header_compiles_those_that_include_it_also_where_only_the_compiler_knows(built: Project) -> None:
    built.write("both.h", "#define VALUE_b 2\n")
    assert built.sum() == 11221
    assert built.compiled() == ["s1", "s2"]
    built.write("hidden.h", "#define VALUE_h 3\n")
    assert built.sum() == 13221
    assert built.compiled() == ["s3"]


def test_a_header_that_appears_earlier_on_the_include_path_compiles_those_that_include_it(project: Project) -> None:
    for folder in ("first", "second"):
        (project.folder / folder).mkdir()
    (project.folder / "both.h").rename(project.folder / "second" / "both.h")
    project.flags += [f"-I{project.folder}/first", f"-I{project.folder}/second"]
    assert project.sum() == 11111
    project.compiled()
    project.write("first/both.h", "#define VALUE_b 2\n")
    assert project.sum() == 11221
    assert project.compiled() == ["s1", "s2"]


def test_what_is_as_it_was_before_is_not_compiled_again(built: Project) -> None:
    before = (built.folder / "s4.cpp").read_text()
    built.write("s4.cpp", "int f4() { return 20000; }\n")
    built.sum()
    built.write("s4.cpp", before)
    cache.clear(f"cpp_extension::{built.name}")
    built.compiled()
    assert built.sum() == 11111
    assert built.compiled() == []


def test_another_nvcc_is_none_of_the_business_of_cpp(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVCC", "ccache nvcc")
    assert project.sum() == 11111
    project.edit("s4.cpp")
    assert (project.sum(), project.compiled()) == (11111, sorted([*ALL, "s4"]))


def test_other_flags_compile_all(built: Project) -> None:
    built.flags = ["-DFLAG=2"]
    assert built.sum() == 21111
    assert built.compiled() == ALL


def test_a_file_that_a_flag_names_is_part_of_the_flags(project: Project) -> None:
    project.write("options", "--defsym NUMBER=1")
    project.flags += [f"-Wa,@{project.folder}/options"]
    project.sum()
    project.compiled()
    project.write("options", "--defsym NUMBER=2")
    project.edit("s0.cpp")
    project.sum()
    assert project.compiled() == ALL


def test_a_file_that_a_flag_includes_is_read_as_a_sources_headers_are(project: Project) -> None:
    for folder in ("first", "second"):
        (project.folder / folder).mkdir()
    project.write("forced.h", "#include <flag.h>\n")
    project.write("second/flag.h", "#define FLAG 1\n")
    project.flags = ["-include", str(project.folder / "forced.h"), f"-I{project.folder}/first", f"-I{project.folder}/second"]
    assert project.sum() == 11111
    project.compiled()
    project.write("first/flag.h", "#define FLAG 2\n")
    assert project.sum() == 21111
    assert project.compiled() == ALL
    project.write("forced.h", "#define FLAG 3\n")
    assert project.sum() == 31111
    assert project.compiled() == ALL


@pytest.mark.torch
def test_another_torch_environment_or_compiler_compiles_all(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("torch.version.git_version", "0" * 40)
        built.edit("s0.cpp")
        assert (built.sum(), built.compiled()) == (11111, ALL)
    with monkeypatch.context() as patch:
        patch.setenv("CPATH", str(built.folder / "bin"))
        built.edit("s0.cpp")
        assert (built.sum(), built.compiled()) == (11111, ALL)
    built.cxx("-UFLAG -DFLAG=2")
    built.edit("s0.cpp")
    assert (built.sum(), built.compiled()) == (21111, ALL)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, lambda path: path.chmod(0o666)])
def test_a_damaged_object_or_one_that_others_can_write_is_compiled_again(
    built: Project, here: Path, damage: Callable[[Path], object]
) -> None:
    for path in kept(here):
        damage(path)
    built.write("s4.cpp", "int f4() { return 20000; }\n")
    assert built.sum() == 21111
    assert built.compiled() == ALL
    built.write("s4.cpp", "int f4() { return 30000; }\n")
    assert built.sum() == 31111
    assert built.compiled() == ["s4"]


def test_a_folder_that_others_can_write_is_not_used(built: Project, here: Path) -> None:
    (here / "v1" / "objects").chmod(0o777)
    before = kept(here)
    built.edit("s4.cpp")
    assert built.sum() == 11111
    assert (built.compiled(), kept(here)) == (ALL, before)


@pytest.mark.torch
def test_a_failed_build_keeps_the_objects_that_are_complete_and_its_error_shows_torchs_command(project: Project, here: Path) -> None:
    project.before(f"if [ $name = s4 ]; then while [ $(ls '{here}/v1/objects' | wc -l) -lt 4 ]; do sleep 0.02; done; fi\n")
    project.write("s4.cpp", "int f4() { return nothing; }\n")
    with pytest.raises(CompileError, match="nothing") as refused:
        project.sum()
    assert refused.value.command is not None
    assert refused.value.command.startswith(str(project.folder / "bin" / "c++"))
    assert refused.value.log is not None
    assert "compiler_launcher.py" not in Path(refused.value.log).read_text()
    assert project.compiled() == ALL
    project.write("s4.cpp", "int f4() { return 20000; }\n")
    assert project.sum() == 21111
    assert project.compiled() == ["s4"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_build_keeps_the_objects_that_are_complete(project: Project, here: Path, end: int) -> None:
    project.before("if [ $name = s4 ]; then exec sleep 5; fi\n")
    code = f"import opjit; opjit.load({project.name!r}, {project.sources!r}, extra_cflags={project.flags!r}, is_python_module=False)"
    with subprocess.Popen([sys.executable, "-c", code], env=environment({}), start_new_session=True, stderr=subprocess.PIPE) as process:
        while not project.log.exists() or "s4" not in project.log.read_text() or len(list((here / "v1" / "objects").glob("[!.]*"))) < 4:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        os.killpg(process.pid, end)
        process.communicate()
    assert project.compiled() == ALL
    project.before("")
    assert project.sum() == 11111
    assert project.compiled() == ["s4"]


def test_a_build_that_a_header_overtakes_keeps_no_object_of_it(project: Project, here: Path) -> None:
    project.before(f"if [ $name = s1 ]; then sleep 0.1; echo '#define VALUE_b 2' > '{project.folder}/both.h'; fi\n")
    with pytest.raises(BuildError, match="sources changed during compilation"):
        project.load()
    assert helpers.entries(here) == []
    project.before("")
    project.write("both.h", "#define VALUE_b 1\n")
    project.compiled()
    assert project.sum() == 11111
    assert "s1" in project.compiled()  # what was compiled before the header changed is right


def test_a_header_that_changed_and_changed_back_during_a_compile_is_noticed(project: Project) -> None:
    both, real = project.folder / "both.h", shutil.which("c++")
    project.before(f"if [ $name = s1 ]; then echo '#define VALUE_b 2' > '{both}'; '{real}' \"$@\"; echo '#define VALUE_b 1' > '{both}';"
                   " exit 0; fi\n")
    project.load()
    project.compiled()
    project.before("")
    project.edit("s0.cpp")
    assert project.sum() == 11111
    assert "s1" in project.compiled()


@pytest.mark.parametrize("as_planned", [True, False])
def test_an_object_of_other_text_than_the_plan_has_is_not_kept_whatever_the_files_dates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_planned: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    source = tmp_path / "one.cpp"
    source.write_text("int one;\n")
    digest = files.digest(str(source)) if as_planned else "0" * 64
    plan = {"folder": str(tmp_path / "kept"), "started": 2**62, "trusted": [],
            "objects": {"one.o": {"key": "a" * 64, "inputs": {str(source): digest}}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert compiler_launcher.main("plan.json", "c++", "-MMD", "-MF", "one.o.d", "-c", str(source), "-o", "one.o") == 0
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["a" * 64] * as_planned


@pytest.mark.parametrize("text", ["const char *now = __TIME__;", "asm(\".incbin \\\"{folder}/both.h\\\"\");"])
def test_an_object_that_depends_on_more_than_its_headers_is_not_kept(project: Project, text: str) -> None:
    project.write("s4.cpp", f"{text.format(folder=project.folder)}\nint f4() {{ return 10000; }}\n")
    project.sum()
    project.compiled()
    project.edit("s0.cpp")
    assert project.sum() == 11111
    assert project.compiled() == ["s0", "s4"]


def test_with_flags_that_may_let_a_compiler_read_more_nothing_is_kept(project: Project, here: Path) -> None:
    for flag in ("--param=ggc-min-expand=20", "$$(true)", "`true`", "-Wp,-DX"):
        assert objects._UNSEEN.search(f"cflags = -O2 {flag}")
    project.flags.append("$$(true)")
    assert project.sum() == 11111
    assert kept(here) == []


def test_the_only_source_of_an_extension_is_not_kept(project: Project, here: Path) -> None:
    project.write("s0.cpp", 'extern "C" int sum() { return 7; }\n')
    opjit.load(project.name, project.sources[:1], is_python_module=False)
    assert not (here / "v1" / "objects").exists()


@pytest.mark.torch
def test_the_entry_is_the_same_bytes_as_without_kept_objects(built: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built.edit("s3.cpp")
    mixed = Path(built.load()).parent
    assert built.compiled() == ["s3"]
    plain = plain_build(built, tmp_path / "other", monkeypatch)
    assert built.compiled() == ALL
    assert mixed.name == plain.name
    assert sorted(path.name for path in mixed.iterdir()) == sorted(path.name for path in plain.iterdir())
    for name in (f"{built.name}.so", "build.ninja"):
        assert (mixed / name).read_bytes() == (plain / name).read_bytes()
    assert verify(mixed, None)[1].document == verify(plain, None)[1].document


def test_two_builds_at_once_that_share_their_objects_are_right(project: Project, here: Path) -> None:
    code = f"""
import ctypes, opjit
print(ctypes.CDLL(opjit.load({project.name!r}, {project.sources!r}, extra_cflags={project.flags!r}, extra_ldflags=["-Wl,-O{{}}"],
                             is_python_module=False)).sum())
"""
    with ThreadPoolExecutor() as pool:
        assert [done.stdout for done in pool.map(lambda level: fresh(code.format(level)), (0, 1))] == ["11111\n"] * 2
    assert set(project.compiled()) == set(ALL)
    assert len(kept(here)) == 5
    assert project.sum() == 11111
    assert project.compiled() == []


def compiled_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the last builds took from the cache, from their log."""
    found = re.findall(r"(\d+ of \d+) objects of ", caplog.text)
    caplog.clear()
    return found


@pytest.mark.nvcc
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA, so nvcc lists no headers")
def test_an_edit_of_one_of_three_cuda_sources_compiles_that_one(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OPJIT_ARCH", "sm_90")
    caplog.set_level("INFO", "opjit")
    (tmp_path / "amount.cuh").write_text("#define AMOUNT 1\n")
    (tmp_path / "main.cpp").write_text('int one(), two();\nextern "C" int sum() { return one() + two(); }\n')
    for name, included in (("one", ""), ("two", '#define TEXT(name) #name\n#include TEXT(amount.cuh)\n')):
        (tmp_path / f"{name}.cu").write_text(f"{included}__global__ void {name}_kernel(int *x) {{ *x = 1; }}\n"
                                             f"int {name}() {{ {name}_kernel<<<1, 1>>>(nullptr); return 10; }}\n")
    name = f"cuda_objects_{os.urandom(4).hex()}"

    def total(*flags: str) -> int:
        sources = [str(tmp_path / path) for path in ("main.cpp", "one.cu", "two.cu")]
        path = opjit.load(name, sources, extra_cuda_cflags=["-O1", *flags], is_python_module=False)
        assert isinstance(path, str)
        return int(ctypes.CDLL(path).sum())

    assert (total(), compiled_of(caplog)) == (20, ["0 of 3"])
    (tmp_path / "one.cu").write_text((tmp_path / "one.cu").read_text().replace("return 10", "return 11"))
    assert (total(), compiled_of(caplog)) == (21, ["2 of 3"])
    (tmp_path / "amount.cuh").write_text("#define AMOUNT 2\n")  # which only the compiler knows
    assert (total(), compiled_of(caplog)) == (21, ["2 of 3"])
    assert (total("-DMORE"), compiled_of(caplog)) == (21, ["1 of 3"])
    assert (total("-keep"), compiled_of(caplog)) == (21, ["1 of 1"])  # what nvcc may then read is unknown: only C++ is looked up
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DEVEN_MORE")
    assert (total(), compiled_of(caplog)) == (21, ["0 of 3"])


def test_what_was_packed_is_unpacked_and_a_changed_byte_is_an_error() -> None:
    packed = compiler_launcher.pack({"/a": "b"}, b"one.o: one.cpp\n", b"object\n")
    assert compiler_launcher.unpack(packed) == ({"/a": "b"}, b"one.o: one.cpp\n", b"object\n")
    for place in range(len(packed)):
        if place != 64:  # the newline after the digest
            with pytest.raises(ValueError, match="SHA-256"):
                compiler_launcher.unpack(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1:])
    for damaged in (packed[:-1], b"", b"\n" * 70):
        with pytest.raises(ValueError, match="SHA-256"):
            compiler_launcher.unpack(damaged)


# --- the cache's commands -----------------------------------------------------------------------------------------------------------------


def planted(root: Path, ages: list[float]) -> list[Path]:
    """Files of 1000 bytes in the place of objects, last used so many seconds ago."""
    folder = root / "v1" / "objects"
    folder.mkdir(parents=True, mode=0o700)
    paths = [folder / f"{number:064x}" for number in range(len(ages))]
    for path, age in zip(paths, ages, strict=True):
        path.write_bytes(bytes(1000))
        os.utime(path, (time.time() - age,) * 2)
    return paths


def test_pruning_takes_the_oldest_objects_and_these_before_entries(entry: Entry) -> None:
    root = cache.path()
    old, middle, new = planted(root, [91 * DAY, 2 * DAY, DAY])
    size = cache.entries()[0].size
    assert (cache.stats().objects, cache.stats().objects_size, cache.stats().size) == (3, 3000, size)
    assert "objects     3, 2.9 KiB\n" in cache_command("stats").output
    done = cache.prune()
    assert (done.objects, done.freed, done.removed, done.size) == (1, 1000, 0, size + 2000)
    assert not old.exists()
    done = cache.prune(size=size + 1500)
    assert (done.objects, done.freed, done.removed, done.size) == (1, 1000, 0, size + 1000)
    assert (middle.exists(), new.exists()) == (False, True)
    result = cache_command("prune", "--size", str(size))
    assert "removed 0 entries and 1 object file, 1000 B; 1 entry" in result.output
    assert helpers.keys() == {entry.key}


def test_clear_takes_all_objects_and_what_killed_builds_left_of_them_unless_ops_are_named(entry: Entry) -> None:
    paths = planted(cache.path(), [0, 0])
    unfinished = paths[0].with_name(f".{paths[0].name}.{'a' * 32}")
    unfinished.touch()
    cache.clear("keytest::plus")
    assert len(kept(cache.path())) == 3
    assert cache.clear().freed == 2000
    assert kept(cache.path()) == []


def test_an_object_that_is_used_is_the_last_to_be_pruned(built: Project, here: Path) -> None:
    for path in kept(here):
        os.utime(path, (1, 1))
    built.edit("s4.cpp")
    built.sum()
    assert len([path for path in kept(here) if path.stat().st_mtime == 1]) == 1  # that of s4 as it was before

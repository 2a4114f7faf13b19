"""`opjit doctor`: each real fault of a machine is found, named in a line, and comes with what to do; a sound machine is sound."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from opjit import backends, doctor
from opjit.doctor import NOTE, OK, PROBLEM, WARNING, Observation
from opjit.errors import CacheWarning
from opjit.recipe import toolchain
from opjit.recipe.compilers import Nvrtc
from opjit.share import remote, trust
from opjit.store.store import Store
from tests import helpers, remotes
from tests.helpers import SOMEBODY, as_root, fake_compiler, is_alive, program, tmpfs, until


@pytest.fixture(autouse=True)
def cache(here: Path) -> Path:
    here.mkdir(mode=0o700)
    return here


def those(observations: Iterable[Observation], *states: str) -> list[Observation]:
    """The observations of some states, which each say what to do unless they are notes."""
    found = list(observations)
    for each in found:
        assert each.state in (OK, NOTE, WARNING, PROBLEM)
        assert each.seen
        assert "\n" not in each.seen + each.todo
        assert each.todo or each.state in (OK, NOTE), each
    return [each for each in found if each.state in states]


def only(observations: Iterable[Observation], *states: str) -> Observation:
    [found] = those(observations, *states)
    return found


@pytest.mark.slow
def test_a_sound_machine_has_no_problem_and_its_cache_is_left_as_it_was(
    cache: Path, tmp_path: Path
) -> None:
    helpers.built(helpers.write_op(tmp_path / "plus"), cache)
    before = helpers.snapshot(cache)
    done = helpers.command("doctor", OPJIT_CAHCE="/elsewhere")
    told = done.stdout
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done
    after = helpers.snapshot(cache)
    assert after.keys() == before.keys()
    # A folder came and went in it, and parts were used.
    expected = [cache, *(cache / "v2" / "parts").iterdir()]
    assert {path for path in after if after[path] != before[path]} <= {*map(str, expected)}
    assert [
        path.name for path in (tmp_path / "tmp").iterdir() if path.name != f"opjit-{os.geteuid()}"
    ] == []
    lines = told.splitlines()
    assert any(
        line.startswith("ok       C op: built in ") and line.endswith("the result is correct")
        for line in lines
    ), told
    assert any(line.startswith("ok       C compiler: ") for line in lines)
    assert re.search(
        r"^ok +C\+\+ program: built in [\d.]+ s with light headers$", told, re.MULTILINE
    )
    assert (
        "warning  environment: OPJIT_CAHCE is set, but opjit does not read this variable" in lines
    )
    assert "         do: did you mean OPJIT_CACHE?" in lines
    assert lines[-1].startswith("0 problems, ")
    assert "\x1b" not in told


def test_a_machine_that_cannot_build_fails_the_command_and_a_terminal_gets_colours(
    tmp_path: Path,
) -> None:
    code, told = helpers.on_terminal(
        "doctor", **helpers.no_compiler(tmp_path), COLUMNS="120", TERM="xterm"
    )
    assert code == 1
    assert "problem" in told
    assert "Traceback" not in told
    assert "no C compiler: opjit looked for $CC, gcc, cc and clang on PATH" in " ".join(
        told.split()
    )
    assert "\x1b[" in told


def test_a_check_that_fails_is_an_observation_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> Iterator[Observation]:
        yield Observation("first", OK, "seen")
        raise ZeroDivisionError("oh")

    def good() -> Iterator[Observation]:
        yield Observation("good", OK, "it is")

    monkeypatch.setattr(doctor, "CHECKS", [fails, good])
    found = list(doctor.examine())
    assert [each[:2] for each in found] == [("first", OK), ("fails", WARNING), ("good", OK)]
    assert "ZeroDivisionError: oh" in found[1].seen


@pytest.mark.parametrize("state", [WARNING, PROBLEM])
def test_the_command_s_json_is_the_observations_and_its_exit_code_the_same(state: str) -> None:
    code = f"""
from opjit import cli, doctor
def check():
    print("a remark")
    yield doctor.Observation("thing", {state!r}, "seen", "do it")
doctor.CHECKS = [check]
cli.main()
"""
    done, plain = (helpers.ended(code, arguments=("doctor", *words)) for words in (["--json"], []))
    assert json.loads(done.stdout) == [
        {"about": "thing", "state": state, "seen": "seen", "todo": "do it"}
    ]
    assert done.returncode == plain.returncode == (1 if state == PROBLEM else 0)


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda path: program(path, "#!/bin/sh\nexit 0\n"), "is not a working gcc or clang"),
        (lambda path: path, "which is not an executable program"),
    ],
)
def test_a_broken_compiler_is_a_problem_and_no_op_is_tried(
    make: Callable[[Path], Path], seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(make(tmp_path / "bin" / "broken-cc")))
    found = only(doctor.tools(), PROBLEM)
    assert (found.about, seen in found.seen) == ("C compiler", True)
    assert list(doctor.c_op()) == [
        Observation("C op", NOTE, "not tried, because a tool is missing")
    ]


@pytest.mark.parametrize(
    ("phase", "seen"),
    [(helpers.COMPILES, "opjit::tensor_negate for cpu"), (helpers.LINKS, "left no valid library")],
)
def test_a_compiler_that_makes_nothing_is_a_problem(
    phase: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CC",
        str(fake_compiler(tmp_path / "bin" / "broken-cc", before=f"if {phase}; then exit 0; fi")),
    )
    assert seen in only(doctor.c_op(), PROBLEM).seen


def test_a_compiler_that_hangs_is_a_problem_in_bounded_time_and_does_not_go_on(
    tmp_path: Path, on_compile: helpers.OnCompile, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    on_compile(f"echo $$ > '{pid}'; exec sleep 1000")
    monkeypatch.setattr(doctor, "TIMEOUT", 5.0)
    found = only(doctor.c_op(), PROBLEM)
    assert "still compiling or running after 5 s" in found.seen
    # A slow machine is not so far in 5 s.
    until(lambda: not pid.exists() or not is_alive(int(pid.read_text())))


def test_a_process_that_dies_is_a_problem_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "opjit.processes.run",
        lambda command, **more: subprocess.CompletedProcess(command, -signal.SIGILL, "", ""),
    )
    monkeypatch.setattr(doctor, "tools", list)  # none
    assert "signal 4, Illegal instruction: no output" in only(doctor.c_op(), PROBLEM).seen


def test_an_op_is_compiled_although_the_cache_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    before = f"if {helpers.COMPILES}; then echo compiled >> {log}; fi"
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "bin" / "cc", before=before)))
    helpers.fresh("import opjit; opjit.get('tensor_negate', 'cpu')")
    assert log.read_text() == "compiled\n"
    assert only(doctor.c_op(), OK).about == "C op"
    assert log.read_text() == "compiled\ncompiled\n"


def test_a_machine_without_a_c_plus_plus_compiler_has_a_warning_and_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    found = next(iter(doctor.programs()))
    assert (found.about, found.state) == ("C++ program", WARNING)
    assert "none" in found.seen
    assert found.todo


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "seen"),
    [
        ("*binding/opjit_bind.o*", "with torch's own headers: .*no binding"),
        ("*opjit_bind.cpp*", "with torch's own headers: "),
    ],
)
def test_a_program_that_takes_a_slow_way_is_a_warning(
    refused: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = f"case $* in {refused}) echo no binding >&2; exit 1;; esac"
    compiler = program(tmp_path / "bin" / "c++", f'#!/bin/sh\n{refuses}\nexec g++ "$@"\n')
    monkeypatch.setenv("CXX", str(compiler))
    found = next(iter(doctor.programs()))
    assert (found.about, found.state) == ("C++ program", WARNING)
    assert re.search(seen, found.seen)


@pytest.mark.nvcc
def test_a_cuda_op_is_really_built() -> None:
    found = list(doctor.cuda_op())
    assert those(found, PROBLEM) == []
    last = found[-1]
    assert (last.about, last.state) == ("CUDA op", OK)
    assert last.seen.startswith("built ")
    assert last.seen.endswith(
        "the result is correct" if torch.cuda.is_available() else "but not run"
    )


def test_no_nvcc_is_a_note_where_nvrtc_or_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = Nvrtc("/lib/libnvrtc.so.13", "/include", "/lib", "13.0 0123")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda notes: None)
    monkeypatch.setattr(
        doctor, "_in_subprocess", lambda about, where: Observation(about, OK, where)
    )
    for missing, found, states in (
        ("no GPU", None, [NOTE, NOTE]),
        (None, None, [NOTE, WARNING]),
        (None, nvrtc, [OK, NOTE, OK]),
    ):
        monkeypatch.setattr(
            type(backends.for_device("cuda")), "available", lambda self, missing=missing: missing
        )
        monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, notes, found=found: found)
        assert [observation.state for observation in doctor.cuda_op()] == states


def test_an_nvcc_that_does_not_work_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "cuda" / "bin" / "nvcc", "#!/bin/sh\necho broken\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = only(doctor.cuda_op(), PROBLEM)
    assert "is not a working nvcc" in found.seen


@as_root
@helpers.no_exec
def test_a_noexec_mount_is_a_problem_for_the_op(cache: Path) -> None:
    with tmpfs(cache, "size=200m,noexec"):
        found = only(doctor.c_op(), PROBLEM)
        assert "noexec" in found.todo
        assert list(cache.iterdir()) == []


@as_root
def test_a_read_only_cache_is_a_warning_and_ops_work(cache: Path) -> None:
    with tmpfs(cache, "size=200m"):
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        found = only(doctor.cache(), WARNING, PROBLEM)
        assert (found.state, "Read-only file system" in found.seen) == (WARNING, True)
        assert those(doctor.c_op(), WARNING, PROBLEM) == []  # its own cache is elsewhere then


@as_root
def test_a_full_cache_is_a_warning(cache: Path) -> None:
    with tmpfs(cache, "size=64k"):
        unwritable, low = those(doctor.cache(), WARNING, PROBLEM)
        assert (
            unwritable.state,
            "cannot be written (No space left on device)" in unwritable.seen,
        ) == (WARNING, True)
        assert (low.state, "are free on its filesystem" in low.seen) == (WARNING, True)


@as_root
@pytest.mark.parametrize("what", ["", "v2/staging"])
def test_a_folder_of_another_user_is_a_warning(cache: Path, what: str) -> None:
    (cache / what).mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(cache / what, SOMEBODY, SOMEBODY)
    found = only(doctor.cache(), WARNING)
    assert f"{(cache / what)} belongs to user {SOMEBODY}" in found.seen
    assert "OPJIT_CACHE" in found.todo


def test_a_cache_or_a_parent_that_others_can_write_is_a_warning_with_the_command_that_helps(
    cache: Path,
) -> None:
    for folder, mode in ((cache, 0o702), (cache.parent, 0o777)):
        folder.chmod(mode)
        found = only(doctor.cache(), WARNING)
        assert f"{folder} can be written by other users (mode {mode:o})" in found.seen
        assert found.todo == f"chmod go-w {folder}"
        folder.chmod(0o700)


def test_a_cache_that_is_a_file_is_a_warning_and_one_that_is_not_there_is_not_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("mine")
    monkeypatch.setenv("OPJIT_CACHE", str(cache / "file"))
    assert "is not a directory" in only(doctor.cache(), WARNING).seen
    monkeypatch.setenv("OPJIT_CACHE", str(cache / "a" / "b"))
    found = list(doctor.cache())
    assert those(found, WARNING, PROBLEM) == []
    assert found[0].seen == f"{cache / 'a' / 'b'}, to be created in {cache}"
    assert [path.name for path in cache.iterdir()] == ["file"]


def test_a_known_variable_is_fine_a_mistyped_one_or_value_is_found_and_a_password_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert those(doctor.variables(), WARNING, PROBLEM) == []
    monkeypatch.setenv("OPJIT_OFLINE", "1")
    monkeypatch.setenv("OPJIT_ENTIRELY_ELSE", "1")
    monkeypatch.setenv("OPJIT_FAST", "OFF")
    monkeypatch.setenv("OPJIT_REMOTE", "https://me:secret@host/x")
    found = list(doctor.variables())
    assert {each.seen.split()[0]: each.todo.split(";")[0] for each in those(found, WARNING)} == {
        "OPJIT_OFLINE": "did you mean OPJIT_OFFLINE?",
        "OPJIT_ENTIRELY_ELSE": "unset it",
        "OPJIT_FAST=OFF": "set OPJIT_FAST=0",
    }
    assert "secret" not in str(found)


def test_a_layer_that_is_no_cache_is_a_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "v2").mkdir()
    monkeypatch.setenv("OPJIT_LAYERS", f"{cache}{os.pathsep}{cache / 'gone'}")
    assert (
        only(doctor.variables(), WARNING).seen == f"{cache / 'gone'} in OPJIT_LAYERS is not a cache"
    )


def test_a_remote_that_answers_is_fine_and_one_that_does_not_is_a_warning_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(doctor.remote()) == []
    monkeypatch.setattr(remote, "_IN_ALL", 5.0)
    remotes.forget(monkeypatch)
    monkeypatch.setenv("OPJIT_REMOTE", (tmp_path / "remote").as_uri())
    assert "nothing from it is trusted" in only(doctor.remote(), WARNING, PROBLEM).seen
    _, public = trust.keygen("ci", tmp_path / "keys")
    monkeypatch.setenv("OPJIT_TRUST", public)
    assert "answers in" in only(doctor.remote(), OK).seen
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    with pytest.warns(CacheWarning, match="anyone who can write"):
        assert (
            "anyone who can write to the remote can run code here"
            in only(list(doctor.remote()), WARNING).seen
        )
    monkeypatch.setenv("OPJIT_TRUST", public)
    with remotes.black_hole() as url:
        monkeypatch.setenv("OPJIT_REMOTE", url.replace("//", "//me:secret@"))
        monkeypatch.setattr(remote, "_IN_ALL", 0.5)
        found = only(doctor.remote(), WARNING, PROBLEM)
    assert found.state == WARNING
    assert f"{url} cannot be used, so ops are built here" in found.seen
    assert "secret" not in str(found)


def test_a_torch_below_the_floor_and_another_machine_are_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert those(doctor.versions(), WARNING, PROBLEM) == []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", TorchVersion("2.9.1+cu128"))
        found = only(doctor.versions(), PROBLEM)
        assert "torch 2.9.1+cu128: opjit needs 2.10 or later" in found.seen
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in only(doctor.versions(), PROBLEM).seen


@pytest.mark.parametrize("name", ["parts", "sets", "tuned", "opjit.allreduce"])
def test_a_folder_of_the_cache_that_others_can_write_is_named(cache: Path, name: str) -> None:
    folder = Store(cache).base / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert str(folder) in only(doctor.cache(), WARNING).seen
    verified = helpers.command("cache", "verify")
    assert f"warning: {folder}" in verified.stderr

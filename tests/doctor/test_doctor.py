"""`opjit doctor`: each real fault of a machine is found, named in a line, and comes with what to do; a sound machine is sound."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from opjit import backends, doctor
from opjit.backends import targets
from opjit.doctor import checks
from opjit.doctor.checks import NOTE, OK, PROBLEM, WARNING, Observation
from opjit.errors import CacheWarning
from opjit.recipe import toolchain
from opjit.recipe.toolchain import Nvcc, Nvrtc
from opjit.share import remote, trust
from tests import helpers, remotes
from tests.helpers import SOMEBODY, as_root, fake_compiler, is_alive, program, tmpfs, until


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a temporary folder of each test's own."""
    for name in ("cache", "temporary"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


@pytest.fixture
def cache(own_folders: Path) -> Path:
    return own_folders / "cache"


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


# --- the command -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sound_machine_has_no_problem_and_its_cache_is_left_as_it_was(cache: Path, own_folders: Path) -> None:
    helpers.built(helpers.write_op(own_folders / "plus"), cache)
    before = {path: times for path, times in helpers.snapshot(cache).items() if path != str(cache)}  # a folder came and went in it
    done = helpers.command("doctor", OPJIT_CAHCE="/elsewhere")
    told = done.stdout
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done
    assert {path: times for path, times in helpers.snapshot(cache).items() if path != str(cache)} == before
    assert [path.name for path in (own_folders / "temporary").iterdir() if path.name != f"opjit-{os.geteuid()}"] == []
    lines = told.splitlines()
    assert any(line.startswith("ok       C op: built in ") and line.endswith("the result is correct") for line in lines), told
    assert any(line.startswith("ok       C compiler: ") for line in lines)
    assert "warning  environment: OPJIT_CAHCE is set, but opjit reads no such variable" in lines
    assert "         do: did you mean OPJIT_CACHE?" in lines
    assert lines[-1].startswith("0 problems, ")
    assert "\x1b" not in told


def test_a_machine_that_cannot_build_fails_the_command_and_a_terminal_gets_colours(own_folders: Path) -> None:
    code, told = helpers.on_terminal("doctor", **helpers.no_compiler(own_folders), COLUMNS="120", TERM="xterm")
    assert code == 1
    assert "problem" in told
    assert "Traceback" not in told
    assert "no C compiler: opjit looked for $CC, gcc, cc and clang on PATH" in " ".join(told.split())
    assert "\x1b[" in told


def test_a_check_that_fails_is_an_observation_and_the_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert json.loads(done.stdout) == [{"about": "thing", "state": state, "seen": "seen", "todo": "do it"}]
    assert done.returncode == plain.returncode == (1 if state == PROBLEM else 0)


# --- compilers -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "seen"), [
    (lambda path: program(path, "#!/bin/sh\nexit 0\n"), "is not a working gcc or clang"),
    (lambda path: path, "which is not an executable program")])
def test_a_broken_compiler_is_a_problem_and_no_op_is_tried(make: Callable[[Path], Path], seen: str, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(make(tmp_path / "bin" / "broken-cc")))
    found = only(checks.tools(), PROBLEM)
    assert (found.about, seen in found.seen) == ("C compiler", True)
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "cuda", torch.version.cuda or "13.0")))
    for check in (checks.c_op, checks.cuda_op):
        assert list(check())[-1][1:] == (NOTE, "not tried, because a tool is missing", "")


@pytest.mark.parametrize(("phase", "seen"), [(helpers.COMPILES, "opjit::tensor_negate for cpu"), (helpers.LINKS, "left no valid library")])
def test_a_compiler_that_makes_nothing_is_a_problem(phase: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "bin" / "broken-cc", before=f"if {phase}; then exit 0; fi")))
    assert seen in only(checks.c_op(), PROBLEM).seen


def test_a_compiler_that_hangs_is_a_problem_in_bounded_time_and_does_not_go_on(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = own_folders / "pid"
    monkeypatch.setenv("CC", str(fake_compiler(own_folders / "bin" / "cc", before=f"if {helpers.COMPILES}; then echo $$ > '{pid}'; "
                                                                                 "exec sleep 1000; fi")))

    class OnceItCompiles(threading.Timer):
        """Ends it then, however slow the machine is."""

        def run(self) -> None:
            until(lambda: pid.exists() and pid.read_text().strip() != "")
            self.function(*self.args, **self.kwargs)

    monkeypatch.setattr(threading, "Timer", OnceItCompiles)
    found = only(checks.c_op(), PROBLEM)
    assert "still compiling or running after" in found.seen
    until(lambda: not is_alive(int(pid.read_text())))


def test_a_process_that_dies_is_a_problem_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen.__init__

    def start(self: subprocess.Popen[bytes], command: list[str], **more: object) -> None:
        if command[1:2] == ["-c"]:
            command = [*command[:2], "import signal; signal.raise_signal(signal.SIGILL)"]
        real(self, command, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    found = only(checks.c_op(), PROBLEM)
    assert "signal 4, Illegal instruction" in found.seen


def test_a_missing_ninja_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_ninja", lambda: None)
    problem = only(checks.tools(), PROBLEM)
    assert (problem.about, "pip install ninja" in problem.todo) == ("ninja", True)
    assert list(checks.c_op()) == [Observation("C op", NOTE, "not tried, because a tool is missing")]


# --- CUDA --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.nvcc
def test_a_cuda_op_is_really_built() -> None:
    found = list(checks.cuda_op())
    assert those(found, PROBLEM) == []
    last = found[-1]
    assert (last.about, last.state) == ("CUDA op", OK)
    assert last.seen.startswith("built ")
    assert last.seen.endswith("the result is correct" if torch.cuda.is_available() else "but not run")


@pytest.mark.parametrize(("missing", "state"), [("no GPU", NOTE), (None, WARNING)])
def test_no_nvcc_is_only_a_note_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, missing: str | None, state: str) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda memory: None)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, memory: None)
    monkeypatch.setattr(type(backends.for_device("cuda")), "available", lambda self: missing)
    assert [(found.about, found.state) for found in checks.cuda_op()] == [("NVRTC", NOTE), ("nvcc", state)]


def test_nvrtc_alone_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda memory: None)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, memory: Nvrtc("/lib/libnvrtc.so.13", "/include", "/lib", "13.0 0123"))
    monkeypatch.setattr(checks, "_in_subprocess", lambda about, where: Observation(about, OK, where))
    found = list(checks.cuda_op())
    assert those(found, WARNING, PROBLEM) == []
    assert found[0].seen == "CUDA 13.0: /lib/libnvrtc.so.13"


FAKE_NVCC = """\
#!/bin/sh
case " $* " in
*" --version "*) echo "Cuda compilation tools, release {release}, V{release}.99";;
*" --dryrun "*) echo '#$ TOP={root}';;
esac
"""


def fake_nvcc(root: Path, release: str) -> Path:
    program(root / "bin" / "nvcc", FAKE_NVCC.format(release=release, root=root))
    return root


@pytest.mark.parametrize(("gpu", "state"), [(True, PROBLEM), (False, WARNING)])
def test_an_nvcc_of_another_major_than_torch_s_is_found(own_folders: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, state: str) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(own_folders / "cuda", "11.8")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvcc = toolchain.find_nvcc(None)
    assert nvcc is not None
    found = checks.version_mismatch(nvcc, gpu)
    assert found is not None
    assert (found.state, "nvcc is from CUDA 11.8" in found.seen, "CUDA 13 toolkit" in found.todo) == (state, True, True)
    assert checks.version_mismatch(Nvcc("/", "13.2", "V13.2.1"), gpu) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert checks.version_mismatch(nvcc, gpu) is None


def test_an_nvcc_that_does_not_work_is_a_problem(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(own_folders / "cuda" / "bin" / "nvcc", "#!/bin/sh\necho broken\n")
    monkeypatch.setenv("CUDA_HOME", str(own_folders / "cuda"))
    found = only(checks.cuda_op(), PROBLEM)
    assert "is not a working nvcc" in found.seen


# --- the cache's filesystem --------------------------------------------------------------------------------------------------------


@as_root
def test_a_noexec_mount_is_a_problem_for_the_op(cache: Path) -> None:
    with tmpfs(cache, "size=200m,noexec"):
        found = only(checks.c_op(), PROBLEM)
        assert "noexec" in found.todo
        assert list(cache.iterdir()) == []


@as_root
def test_a_read_only_cache_is_a_warning_and_ops_work(cache: Path) -> None:
    with tmpfs(cache, "size=200m"):
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        found = only(checks.cache(), WARNING, PROBLEM)
        assert (found.state, "Read-only file system" in found.seen) == (WARNING, True)
        assert those(checks.c_op(), WARNING, PROBLEM) == []  # its own cache is elsewhere then


@as_root
def test_a_full_cache_is_a_warning(cache: Path) -> None:
    with tmpfs(cache, "size=64k"):
        unwritable, low = those(checks.cache(), WARNING, PROBLEM)
        assert (unwritable.state, "cannot be written (No space left on device)" in unwritable.seen) == (WARNING, True)
        assert (low.state, "are free on its filesystem" in low.seen) == (WARNING, True)


@as_root
@pytest.mark.parametrize("what", ["", "v1", "v1/staging", "v1/toolchain"])
def test_a_folder_of_another_user_is_a_warning(cache: Path, what: str) -> None:
    (cache / what).mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(cache / what, SOMEBODY, SOMEBODY)
    found = only(checks.cache(), WARNING)
    assert f"{(cache / what)} belongs to user {SOMEBODY}" in found.seen
    assert "OPJIT_CACHE" in found.todo


@pytest.mark.parametrize("mode", [0o702, 0o777])
def test_a_cache_that_others_can_write_is_a_warning_with_the_command_that_helps(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    found = only(checks.cache(), WARNING)
    assert f"(mode {mode:o})" in found.seen
    assert found.todo == f"chmod go-w {cache}"


def test_a_parent_in_which_others_can_swap_the_cache_is_a_warning(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_folders / "open" / "cache").mkdir(parents=True)
    (own_folders / "open").chmod(0o777)
    monkeypatch.setenv("OPJIT_CACHE", str(own_folders / "open" / "cache"))
    found = only(checks.cache(), WARNING)
    assert f"{own_folders / 'open'} can be written by others (mode 777)" in found.seen
    (own_folders / "open").chmod(0o1777)
    assert those(checks.cache(), WARNING, PROBLEM) == []
    if os.geteuid() == 0:
        os.chown(own_folders / "open", SOMEBODY, SOMEBODY)
        assert f"belongs to user {SOMEBODY}" in only(checks.cache(), WARNING).seen


def test_a_cache_that_is_a_file_is_a_warning(cache: Path) -> None:
    cache.rmdir()
    cache.write_text("mine")
    assert "is not a folder" in only(checks.cache(), WARNING).seen
    assert cache.read_text() == "mine"


def test_a_cache_that_is_not_there_is_looked_at_where_it_will_be_made_and_not_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(cache / "a" / "b"))
    found = list(checks.cache())
    assert those(found, WARNING, PROBLEM) == []
    assert found[0].seen == f"{cache / 'a' / 'b'}, to be created in {cache}"
    assert list(cache.iterdir()) == []


# --- the environment -----------------------------------------------------------------------------------------------------------------


def test_a_known_variable_is_fine_a_mistyped_one_or_value_is_found_and_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert those(checks.variables(), WARNING, PROBLEM) == []
    monkeypatch.setenv("OPJIT_OFLINE", "1")
    monkeypatch.setenv("OPJIT_ENTIRELY_ELSE", "1")
    monkeypatch.setenv("OPJIT_FAST", "OFF")
    monkeypatch.setenv("OPJIT_REMOTE", "https://me:secret@host/x")
    found = list(checks.variables())
    assert {each.seen.split()[0]: each.todo.split(";")[0] for each in those(found, WARNING)} == {
        "OPJIT_OFLINE": "did you mean OPJIT_OFFLINE?", "OPJIT_ENTIRELY_ELSE": "unset it", "OPJIT_FAST=OFF": "set OPJIT_FAST=0"}
    assert "secret" not in str(found)


def test_a_layer_that_is_no_cache_is_a_warning(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "v1").mkdir()
    monkeypatch.setenv("OPJIT_LAYERS", f"{cache}{os.pathsep}{cache / 'gone'}")
    assert only(checks.variables(), WARNING).seen == f"{cache / 'gone'} in OPJIT_LAYERS is not a cache"


def test_a_remote_that_answers_is_fine_and_one_that_does_not_is_a_warning_in_bounded_time(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(checks.remote()) == []
    monkeypatch.setattr(remote, "_IN_ALL", 5.0)
    remotes.forget(monkeypatch)
    monkeypatch.setenv("OPJIT_REMOTE", (own_folders / "remote").as_uri())
    assert "nothing from it is trusted" in only(checks.remote(), WARNING, PROBLEM).seen
    _, public = trust.keygen("ci", own_folders / "keys")
    monkeypatch.setenv("OPJIT_TRUST", public)
    assert "answers in" in only(checks.remote(), OK).seen
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    with pytest.warns(CacheWarning, match="anyone who can write"):
        assert "anyone who can write to the remote can run code here" in only(list(checks.remote()), WARNING).seen
    monkeypatch.setenv("OPJIT_TRUST", public)
    with remotes.black_hole() as url:
        monkeypatch.setenv("OPJIT_REMOTE", url.replace("//", "//me:secret@"))
        monkeypatch.setattr(remote, "_IN_ALL", 0.5)
        found = only(checks.remote(), WARNING, PROBLEM)
    assert found.state == WARNING
    assert f"{url} cannot be used, so ops are built here" in found.seen
    assert "secret" not in str(found)


def test_a_torch_below_the_floor_and_another_machine_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert those(checks.versions(), WARNING, PROBLEM) == []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.1+cu128")
        found = only(checks.versions(), PROBLEM)
        assert "torch 2.9.1+cu128: opjit needs 2.10 or later" in found.seen
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in only(checks.versions(), PROBLEM).seen


def test_gpus_are_told() -> None:
    [found] = checks.gpus()
    if torch.cuda.is_available():
        assert (found.state, targets.here(backends.for_device("cuda")).arch in found.seen) == (OK, True)
    else:
        assert found.state in (NOTE, WARNING)

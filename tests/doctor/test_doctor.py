"""`opjit doctor`: each real fault of a machine is found, named in a line, and comes with what to do; a sound machine is sound."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opjit import backends, doctor, files
from opjit.backends import targets
from opjit.doctor import compilers, folders, machine
from opjit.doctor.report import NOTE, OK, PROBLEM, WARNING, Observation
from opjit.errors import CacheWarning
from opjit.recipe import toolchain
from opjit.recipe.toolchain import Nvcc, Nvrtc
from opjit.share import remote, trust
from opjit.store import lock
from tests import helpers, remotes
from tests.helpers import SOMEBODY, as_root, fake_compiler, is_alive, program, tmpfs, until


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a temporary folder of each test's own; other tests' locks are none of its business."""
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
    found = those(observations, *states)
    assert len(found) == 1, found
    return found[0]


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


def test_a_check_that_hangs_or_fails_is_an_observation_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs() -> Iterator[Observation]:
        threading.Event().wait()
        yield Observation("never", OK, "never")

    def fails() -> Iterator[Observation]:
        yield Observation("first", OK, "seen")
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(doctor, "TIMEOUT", 1.0)
    monkeypatch.setattr(doctor, "CHECKS", {"hangs": hangs, "fails": fails, "good": lambda: [Observation("good", OK, "it is")]})
    found = doctor.examine()
    assert [each[:2] for each in found] == [("hangs", PROBLEM), ("first", OK), ("fails", WARNING), ("good", OK)]
    assert "no answer within 1 s" in found[0].seen
    assert "ZeroDivisionError: oh" in found[2].seen
    assert doctor.show() == 1


@pytest.mark.parametrize("state", [WARNING, PROBLEM])
def test_the_command_s_json_is_the_observations_and_its_exit_code_the_same(state: str) -> None:
    code = f"""
from opjit import cli, doctor

def check():
    print("a remark")
    yield doctor.Observation("thing", {state!r}, "seen", "do it")

doctor.CHECKS = {{"thing": check}}
cli.main()
"""
    done, plain = (helpers.ended(code, arguments=("doctor", *words)) for words in (["--json"], []))
    assert json.loads(done.stdout) == [{"about": "thing", "state": state, "seen": "seen", "todo": "do it"}]
    assert done.returncode == plain.returncode == (1 if state == PROBLEM else 0)


def test_the_command_ends_though_a_check_hangs_in_a_folder_that_it_made(tmp_path: Path) -> None:
    """Removing that folder would hang as well."""
    code = (
        "import shutil, tempfile, threading\n"
        "from opjit import doctor\n"
        "def hangs():\n"
        "    with tempfile.TemporaryDirectory():\n"
        "        shutil.rmtree = lambda *arguments, **more: threading.Event().wait()\n"
        "        threading.Event().wait()\n"
        "doctor.TIMEOUT, doctor.CHECKS = 1.0, {'hangs': hangs}\n"
        "doctor.main()\n"
    )
    done = helpers.ended(code)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[0] == "problem  hangs: no answer within 1 s"


# --- compilers -----------------------------------------------------------------------------------------------------------------------


BROKEN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "silent": (lambda path: program(path, "#!/bin/sh\nexit 0\n"), "C compiler", "is not a working gcc or clang"),
    "missing": (lambda path: path, "C compiler", "which is not an executable program"),
    "compiles-nothing": (lambda path: fake_compiler(path, before=f"if {helpers.COMPILES}; then exit 0; fi"), "C op",
                         "opjit::tensor_negate for cpu"),
    "links-nothing": (lambda path: fake_compiler(path, before=f"if {helpers.LINKS}; then exit 0; fi"), "C op", "left no valid library"),
}


@pytest.mark.parametrize(("make", "about", "seen"), BROKEN.values(), ids=BROKEN)
def test_a_broken_compiler_is_a_problem(make: Callable[[Path], Path], about: str, seen: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(make(tmp_path / "bin" / "broken-cc")))
    found = only(compilers.c_op(), PROBLEM)
    assert (found.about, seen in found.seen) == (about, True)


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
    found = only(compilers.c_op(), PROBLEM)
    assert "still compiling or running after" in found.seen
    until(lambda: not is_alive(int(pid.read_text())))


def test_a_process_that_dies_is_a_problem_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen.__init__

    def start(self: subprocess.Popen[bytes], command: list[str], **more: object) -> None:
        if command[1:2] == ["-c"]:
            command = [*command[:2], "import signal; signal.raise_signal(signal.SIGILL)"]
        real(self, command, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    found = only(compilers.c_op(), PROBLEM)
    assert "signal 4, Illegal instruction" in found.seen


def test_a_missing_ninja_is_a_problem(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = own_folders / "tools"
    tools.mkdir()
    (tools / "gcc").symlink_to(helpers.real_compiler())
    for name in ("as", "ld"):
        (tools / name).symlink_to(shutil.which(name) or "/usr/bin/" + name)
    (own_folders / "shadow").mkdir()
    (own_folders / "shadow" / "ninja.py").write_text("raise ImportError('not installed')\n")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(own_folders / "shadow"), os.environ.get("PYTHONPATH", "")]))
    found = list(compilers.c_op())
    problem = only(found, PROBLEM)
    assert (problem.about, "pip install ninja" in problem.todo) == ("ninja", True)
    assert found[-1] == Observation("C op", NOTE, "not tried, because a tool is missing")


# --- CUDA --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.nvcc
def test_a_cuda_op_is_really_built_and_its_binary_looked_into() -> None:
    found = list(compilers.cuda_op())
    assert those(found, PROBLEM) == []
    last = found[-1]
    assert (last.about, last.state) == ("CUDA op", OK)
    if torch.cuda.is_available():
        assert "run on" in last.seen
    else:
        assert "its binary holds code for sm_90 and needs libcudart.so." in last.seen


@pytest.mark.parametrize(("missing", "state"), [("no GPU", NOTE), (None, WARNING)])
def test_no_nvcc_is_only_a_note_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, missing: str | None, state: str) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda memory: None)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, memory: None)
    monkeypatch.setattr(type(backends.for_device("cuda")), "available", lambda self: missing)
    assert [(found.about, found.state) for found in compilers._check_cuda()] == [("NVRTC", NOTE), ("nvcc", state)]


def test_nvrtc_alone_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda memory: None)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, memory: Nvrtc("/lib/libnvrtc.so.13", "/include", "/lib", "13.0 0123"))
    monkeypatch.setattr(compilers, "_have_tools", lambda: False)
    found = list(compilers._check_cuda())
    assert those(found, WARNING, PROBLEM) == []
    assert found[0].seen == "CUDA 13.0: /lib/libnvrtc.so.13"


FAKE_NVCC = """\
#!/bin/sh
case " $* " in
*" --version "*) echo "Cuda compilation tools, release {release}, V{release}.99";;
*" --dryrun "*) echo '#$ TOP={root}';;
*) echo '{root}/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 11 are not supported!'
   exit 1;;
esac
"""


def fake_nvcc(root: Path, release: str) -> Path:
    for name in ("include", "lib64"):
        (root / name).mkdir(parents=True)
    program(root / "bin" / "nvcc", FAKE_NVCC.format(release=release, root=root))
    return root


@pytest.mark.parametrize(("gpu", "state"), [(True, PROBLEM), (False, WARNING)])
def test_an_nvcc_of_another_major_than_torch_s_is_found(own_folders: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, state: str) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(own_folders / "cuda", "11.8")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvcc = toolchain.find_nvcc(None)
    assert nvcc is not None
    found = compilers.version_mismatch(nvcc, gpu)
    assert found is not None
    assert (found.state, "nvcc is from CUDA 11.8" in found.seen, "CUDA 13 toolkit" in found.todo) == (state, True, True)
    assert compilers.version_mismatch(Nvcc("/", "13.2", "V13.2.1"), gpu) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert compilers.version_mismatch(nvcc, gpu) is None


@pytest.mark.skipif(toolchain.find_nvrtc("", None) is not None, reason="NVRTC compiles the op, so nvcc is not asked")
def test_a_host_compiler_that_nvcc_refuses_is_a_problem_that_names_cc(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(own_folders / "cuda", (torch.version.cuda or "13.0"))))
    found = only(compilers.cuda_op(), PROBLEM)
    assert found.about == "CUDA op"
    assert "unsupported GNU version! gcc versions later than 11" in found.seen
    assert found.todo.startswith("set CC to a gcc or clang that this nvcc accepts")


def test_a_broken_compiler_is_reported_with_the_c_op_alone(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(own_folders / "cuda", torch.version.cuda or "13.0")))
    monkeypatch.setenv("CC", str(program(own_folders / "broken-cc", "#!/bin/sh\nexit 0\n")))
    found = list(compilers.cuda_op())
    assert those(found, PROBLEM) == []
    assert found[-1] == Observation("CUDA op", NOTE, "not tried, because a tool is missing")


def test_an_nvcc_that_does_not_work_is_a_problem(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(own_folders / "cuda" / "bin" / "nvcc", "#!/bin/sh\necho broken\n")
    monkeypatch.setenv("CUDA_HOME", str(own_folders / "cuda"))
    found = only(compilers.cuda_op(), PROBLEM)
    assert "is not a working nvcc" in found.seen


# --- the cache's filesystem --------------------------------------------------------------------------------------------------------


@as_root
def test_a_noexec_mount_is_a_problem_for_the_cache_and_a_warning_for_the_temporary_folder(own_folders: Path) -> None:
    for name, check, state, variable in (("cache", folders.cache, PROBLEM, "OPJIT_CACHE"),
                                         ("temporary", folders.temporary, WARNING, "TMPDIR")):
        with tmpfs(own_folders / name, "size=200m,noexec"):
            found = only(check(), WARNING, PROBLEM)
            assert (found.state, "mounted noexec" in found.seen, variable in found.todo) == (state, True, True)
            assert list((own_folders / name).iterdir()) == []


@as_root
def test_a_read_only_cache_is_a_warning_and_ops_work(cache: Path) -> None:
    with tmpfs(cache, "size=200m"):
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        found = only(folders.cache(), WARNING, PROBLEM)
        assert (found.state, "Read-only file system" in found.seen) == (WARNING, True)
        assert those(compilers.c_op(), WARNING, PROBLEM) == []  # its own cache is elsewhere then


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("size", ["4k", "64k", "512k"])
def test_a_full_cache_is_a_warning_and_ops_work(cache: Path, size: str) -> None:
    with tmpfs(cache, f"size={size}"):
        if size == "4k":
            (cache / "filler").write_bytes(bytes(4096))
        found = those(folders.cache(), WARNING, PROBLEM)
        assert [each.state for each in found] == [WARNING, WARNING]
        assert "are free on its filesystem" in found[0].seen
        assert "full or over quota (No space left on device)" in found[1].seen
        if size == "64k":
            assert those(compilers.c_op(), PROBLEM) == []


@as_root
@pytest.mark.parametrize("what", ["", "v1", "v1/staging", "v1/toolchain"])
def test_a_folder_of_another_user_is_a_warning(cache: Path, what: str) -> None:
    (cache / what).mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(cache / what, SOMEBODY, SOMEBODY)
    found = only(folders.cache(), WARNING)
    assert f"{(cache / what)} belongs to user {SOMEBODY}" in found.seen
    assert "OPJIT_CACHE" in found.todo


@pytest.mark.parametrize("mode", [0o702, 0o777])
def test_a_cache_that_others_can_write_is_a_warning_with_the_command_that_helps(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    found = only(folders.cache(), WARNING)
    assert f"(mode {mode:o})" in found.seen
    assert found.todo == f"chmod go-w {cache}"


def test_a_parent_in_which_others_can_swap_the_cache_is_a_warning(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_folders / "open" / "cache").mkdir(parents=True)
    (own_folders / "open").chmod(0o777)
    monkeypatch.setenv("OPJIT_CACHE", str(own_folders / "open" / "cache"))
    found = only(folders.cache(), WARNING)
    assert f"{own_folders / 'open'} can be written by others (mode 777)" in found.seen
    (own_folders / "open").chmod(0o1777)
    assert those(folders.cache(), WARNING, PROBLEM) == []
    if os.geteuid() == 0:
        os.chown(own_folders / "open", SOMEBODY, SOMEBODY)
        assert f"belongs to user {SOMEBODY}" in only(folders.cache(), WARNING).seen


def test_a_cache_that_is_a_file_is_a_warning(cache: Path) -> None:
    cache.rmdir()
    cache.write_text("mine")
    assert "is not a folder" in only(folders.cache(), WARNING).seen
    assert cache.read_text() == "mine"


def test_a_cache_that_is_not_there_is_looked_at_where_it_will_be_made_and_not_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(cache / "a" / "b"))
    found = list(folders.cache())
    assert those(found, WARNING, PROBLEM) == []
    assert found[0].seen == f"{cache / 'a' / 'b'}, to be created in {cache}"
    assert list(cache.iterdir()) == []


def failing(code: int) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def rename_over(one: Path, other: Path, rename: Callable[[Path, Path], None] = os.rename) -> None:
    shutil.rmtree(other, ignore_errors=True)
    rename(one, other)


def squashing(path: Path, trusted_as: Path | None = None, check: Callable[..., str | None] = files.distrusted) -> str | None:
    """As an NFS server does that gives new files to another user."""
    return f"{path} belongs to user 65534, not to you or root" if path.name == "own" else check(path, trusted_as)


@pytest.mark.parametrize(("module", "name", "instead", "seen"), [
    (fcntl, "flock", lambda file, how: None, "a held lock can be taken again"),
    (fcntl, "flock", failing(errno.ENOSYS), "locking a file failed: Function not implemented"),
    (fcntl, "flock", failing(errno.ENOLCK), "locking a file failed: No locks available"),
    (os, "fsync", failing(errno.EIO), "writing and syncing a new file failed: Input/output error"),
    (os, "rename", failing(errno.EIO), "renaming a folder failed: Input/output error"),
    (os, "rename", rename_over, "renaming a folder replaces one that is not empty"),
    (files, "distrusted", squashing, "belongs to user 65534"),
])
def test_a_filesystem_that_cannot_do_what_opjit_needs_is_a_warning(monkeypatch: pytest.MonkeyPatch, module: object, name: str,
                                                                   instead: Callable[..., Any], seen: str) -> None:
    monkeypatch.setattr(module, name, instead)
    for check in (folders.cache, folders.temporary):
        assert seen in those(check(), WARNING)[0].seen


def test_a_filesystem_s_type_is_known_or_unknown(tmp_path: Path) -> None:
    assert (folders.filesystem(Path("/proc/self")), folders.filesystem(tmp_path / "gone")) == ("proc", "unknown")


@pytest.mark.parametrize(("kinds", "cache_state", "temporary_states"), [
    (("nfs4", "lustre", "gpfs", "fuse.sshfs"), NOTE, [WARNING]), (("overlay", "tmpfs"), NOTE, []), (("ext4", "xfs"), OK, [])])
def test_a_filesystem_s_kind_comes_with_advice(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], cache_state: str,
                                               temporary_states: list[str]) -> None:
    for kind in kinds:
        monkeypatch.setattr(folders, "filesystem", lambda place, kind=kind: kind)
        [told] = [each for each in folders.cache() if each.seen.startswith(f"on {kind}") or "container's own layer" in each.seen]
        assert told.state == cache_state
        assert [each.state for each in those(folders.temporary(), WARNING)] == temporary_states


# --- builds: leftovers and locks -----------------------------------------------------------------------------------------------------


def test_staging_folders_are_told_by_age(cache: Path) -> None:
    assert [each.seen for each in folders.builds()] == ["none under way, none left behind"]
    staging = cache / "v1" / "staging"
    for name, age in (("old", 3 * 86400 + 5), ("new", 60.0)):
        (staging / name).mkdir(parents=True)
        os.utime(staging / name, (time.time() - age,) * 2)
    [found] = folders.builds()
    assert (found.state, "1 under way or killed less than a day ago, 1 older" in found.seen) == (OK, True)


@as_root
def test_a_lock_folder_that_others_can_write_is_a_warning() -> None:
    lock.folder().mkdir()
    lock.folder().chmod(0o777)
    assert "builds run without locks" in only(folders.temporary(), WARNING).seen
    lock.folder().chmod(0o700)
    os.chown(lock.folder(), SOMEBODY, SOMEBODY)
    assert f"belongs to user {SOMEBODY}" in only(folders.temporary(), WARNING).seen


# --- the environment -----------------------------------------------------------------------------------------------------------------


def test_a_known_variable_is_fine_a_mistyped_one_or_value_is_found_and_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert those(machine.variables(), WARNING, PROBLEM) == []
    monkeypatch.setenv("OPJIT_OFLINE", "1")
    monkeypatch.setenv("OPJIT_ENTIRELY_ELSE", "1")
    monkeypatch.setenv("OPJIT_FAST", "OFF")
    monkeypatch.setenv("OPJIT_REMOTE", "https://me:secret@host/x")
    found = list(machine.variables())
    assert {each.seen.split()[0]: each.todo.split(";")[0] for each in those(found, WARNING)} == {
        "OPJIT_OFLINE": "did you mean OPJIT_OFFLINE?", "OPJIT_ENTIRELY_ELSE": "unset it", "OPJIT_FAST=OFF": "set OPJIT_FAST=0"}
    assert "secret" not in str(found)


def test_a_relative_cache_and_a_layer_that_is_none_are_warnings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "v1").mkdir()
    monkeypatch.setenv("OPJIT_CACHE", "build/cache")
    monkeypatch.setenv("OPJIT_LAYERS", f"{cache}{os.pathsep}{cache / 'gone'}")
    assert [each.seen.split()[0] for each in those(machine.variables(), WARNING)] == ["OPJIT_CACHE=build/cache", str(cache / "gone")]


def test_a_remote_that_answers_is_fine_and_one_that_does_not_is_a_warning_in_bounded_time(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(machine.remote()) == []
    monkeypatch.setattr(remote, "_IN_ALL", 5.0)
    remotes.forget(monkeypatch)
    monkeypatch.setenv("OPJIT_REMOTE", (own_folders / "remote").as_uri())
    assert "nothing from it is trusted" in only(machine.remote(), WARNING, PROBLEM).seen
    _, public = trust.keygen("ci", own_folders / "keys")
    monkeypatch.setenv("OPJIT_TRUST", public)
    assert "answers in" in only(machine.remote(), OK).seen
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    with pytest.warns(CacheWarning, match="anyone who can write"):
        assert "anyone who can write to the remote can run code here" in only(list(machine.remote()), WARNING).seen
    monkeypatch.setenv("OPJIT_TRUST", public)
    with remotes.black_hole() as url:
        monkeypatch.setenv("OPJIT_REMOTE", url.replace("//", "//me:secret@"))
        monkeypatch.setattr(remote, "_IN_ALL", 0.5)
        found = only(machine.remote(), WARNING, PROBLEM)
    assert found.state == WARNING
    assert f"{url} cannot be used, so ops are built here" in found.seen
    assert "secret" not in str(found)


def test_a_torch_below_the_floor_and_another_machine_or_c_library_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert those(machine.versions(), WARNING, PROBLEM) == []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.1+cu128")
        found = only(machine.versions(), PROBLEM)
        assert "torch 2.9.1+cu128: opjit needs 2.10 or later" in found.seen
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "riscv64")
        assert "riscv64" in only(machine.versions(), PROBLEM).seen
    monkeypatch.setattr(os, "confstr", lambda name: None)
    assert "not glibc" in only(machine.versions(), PROBLEM).seen


def test_gpus_are_told() -> None:
    [found] = machine.gpus()
    if torch.cuda.is_available():
        assert (found.state, targets.here(backends.for_device("cuda")).arch in found.seen) == (OK, True)
    else:
        assert found.state in (NOTE, WARNING)

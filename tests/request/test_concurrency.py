"""Many at once: processes, threads, forks and builders that die. A build happens once, and no death blocks the next."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import api, build, lock, targets
from opjit.store import Store
from tests import helpers
from tests.helpers import cache_warnings, fake_compiler, fresh, hold, is_alive, until

MakeOp = Callable[..., opjit.Op]
ADD = """
opjit_status add_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + %s.0f;
    return OPJIT_OK;
}
"""


# --- one build -----------------------------------------------------------------------------------------------------------------------


def test_64_processes_that_ask_for_one_cold_op_compile_it_once_and_all_get_right_answers(op: Path, here: Path, log: Path) -> None:
    code = (
        helpers.declare(op)
        + """
import os, sys, time
from torch.utils import cpp_extension  # before the fork, to stay light
torch.set_num_threads(1)
ready, go = os.pipe(), os.pipe()
children = []
for number in range(64):
    child = os.fork()
    if child == 0:
        try:
            os.close(go[1])
            os.write(ready[1], b"r")
            os.read(go[0], 1)  # returns when the parent closes the other end: all start at once
            warnings.simplefilter("error")
            right = torch.equal(opjit.get("keytest::plus", "cpu")(torch.full((3,), float(number))), torch.full((3,), number + 1.0))
            os._exit(0 if right else 3)
        except BaseException as error:
            print(type(error), error, file=sys.stderr, flush=True)
            os._exit(4)
    children.append(child)
for _ in children:
    os.read(ready[0], 1)
os.close(go[1])
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 64)
"""
    )
    done = fresh(code)
    assert done.stdout == "True\n", done.stderr
    assert len(log.read_text().split()) == 1
    assert len(helpers.entries(here)) == 1


def test_without_working_locks_processes_build_more_often_and_are_all_right(op: Path, here: Path, log: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp" / f"opjit-{os.geteuid()}").write_text("not a folder")
    code = (
        helpers.declare(op)
        + """
import os
from torch.utils import cpp_extension
children = []
for number in range(6):
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        os._exit(0 if opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist() == [2.0] else 3)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
    )
    assert fresh(code).stdout == "[0, 0, 0, 0, 0, 0]\n"
    assert len(helpers.entries(here)) == 1


def test_32_threads_that_ask_for_one_op_compile_it_once(make_op: MakeOp, here: Path, log: Path) -> None:
    op = make_op("add(Tensor x) -> Tensor", ADD % 1, fake=torch.empty_like)
    barrier = threading.Barrier(32)

    def ask(number: int) -> bool:
        barrier.wait()
        x = torch.full((4,), float(number))
        got = opjit.get(op.qualified, "cpu") if number % 2 else op  # the other half comes through the first dispatch
        return torch.equal(got(x), x + 1)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(ask, range(32)))
    assert len(log.read_text().split()) == 1


def test_different_ops_built_in_threads_at_once_are_all_right(make_op: MakeOp, here: Path) -> None:
    from torch.utils import cpp_extension

    before = dict(os.environ), cpp_extension.TORCH_LIB_PATH, cpp_extension.CUDA_HOME
    ops = [make_op("add(Tensor x) -> Tensor", ADD % amount, fake=torch.empty_like) for amount in range(8)]
    barrier = threading.Barrier(8)

    def ask(amount: int) -> float:
        barrier.wait()
        return float(opjit.get(ops[amount].qualified, "cpu")(torch.ones(1)).item())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [1.0 + amount for amount in range(8)]
    assert (dict(os.environ), cpp_extension.TORCH_LIB_PATH, cpp_extension.CUDA_HOME) == before


def test_two_builders_of_one_key_in_one_process_get_the_same_entry(op: Path, tmp_path: Path) -> None:
    recipe, store = helpers.describe(op), Store(tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build.build(recipe, store), range(4)))
    assert len(set(built)) == 1
    assert len(helpers.entries(tmp_path / "cache")) == 1


def test_a_build_leaves_the_environment_and_torch_s_builder_as_they_were_also_when_it_fails(op: Path, tmp_path: Path) -> None:
    import logging

    from torch.utils import cpp_extension

    def state() -> Any:
        return (
            dict(os.environ),
            cpp_extension.TORCH_LIB_PATH,
            cpp_extension.CUDA_HOME,
            logging.getLogger("torch.utils.cpp_extension").level,
            os.getcwd(),
            sorted(sys.path),
        )

    before = state()
    helpers.built(op, tmp_path / "cache")
    assert state() == before
    (op / "plus.c").write_text("nonsense")
    with pytest.raises(opjit.errors.CompileError):
        helpers.built(op, tmp_path / "cache")
    assert state() == before


# --- builders that die ---------------------------------------------------------------------------------------------------------------


def build_in_background(op: Path) -> subprocess.Popen[bytes]:
    """A process, and a group of its own, that builds the op."""
    return subprocess.Popen(
        [sys.executable, "-c", helpers.declare(op) + "opjit.get('keytest::plus', 'cpu')"],
        env=helpers.environment(),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )


STAGES = {
    "while-it-compiles": (helpers.COMPILES, "before"),
    "after-it-compiled": (helpers.COMPILES, "after"),
    "while-it-links": (helpers.LINKS, "before"),
    "after-it-linked": (helpers.LINKS, "after"),
}


@pytest.mark.parametrize(("stage", "whole_group"), [*((stage, True) for stage in STAGES), ("while-it-compiles", False)])
def test_a_killed_builder_s_waiter_builds_at_once(
    make_op: MakeOp, op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, whole_group: bool
) -> None:
    reached, (when, where) = tmp_path / "reached", STAGES[stage]
    stop = f"if {when} && mkdir '{reached}' 2>/dev/null; then sleep 30; fi"  # only the first to come here
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "slow-cc", **{where: stop})))
    from torch.utils import cpp_extension  # noqa: F401 - not part of the time measured below

    victim = build_in_background(op)
    until(reached.exists, process=victim)
    waits: list[str] = []
    recipe = helpers.describe(op)
    assert recipe.key is not None
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        (os.killpg if whole_group else os.kill)(victim.pid, signal.SIGKILL)
        victim.wait()

    threading.Timer(0.4, kill).start()
    with lock.held(recipe.key, waits.append):
        assert killed, "the lock was free while its holder lived"
        waited = time.monotonic() - killed[0]
        entry = build.build(recipe, Store(here))
    if not whole_group:
        os.killpg(victim.pid, signal.SIGKILL)
    assert waited < 1  # the poll is 0.05 s; the machine may be busy
    assert len(waits) == 1
    assert re.fullmatch(rf"process {victim.pid}, which has been building it since \d\d:\d\d:\d\d \(compiling\)", waits[0])
    assert helpers.caught(op, here) == helpers.Caught(entry, [])


def test_a_builder_killed_at_any_moment_leaves_nothing_that_harms(op: Path, here: Path) -> None:
    code = (
        helpers.declare(op)
        + f"""
import os, signal, time
from torch.utils import cpp_extension
from tests import helpers
from opjit import lock
folder, cache = Path({str(op)!r}), Path({str(here)!r})
for moment in range(16):
    (folder / "amount.h").write_text(f"#define AMOUNT {{moment}}.0f")
    child = os.fork()
    if child == 0:
        os.setsid()
        opjit.get("keytest::plus", "cpu")
        os._exit(0)
    time.sleep(0.025 * moment)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    began = time.monotonic()
    with lock.held(helpers.describe(folder).key, lambda holder: None):
        assert time.monotonic() - began < 5, moment  # a compiler that was just being started may keep the lock for a moment
    first = helpers.caught(folder, cache)
    assert first.warnings == [], (moment, first)
    assert helpers.caught(folder, cache) == first
print("done")
"""
    )
    assert fresh(code).stdout == "done\n"


def test_a_waiter_finds_what_the_holder_built_and_says_whom_it_waited_for(op: Path, here: Path, log: Path) -> None:
    code = helpers.declare(op) + (
        "import os\nos.environ['OPJIT_VERBOSE'] = '1'\nprint(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())"
    )
    recipe = helpers.describe(op)
    assert recipe.key is not None
    with lock.held(recipe.key, lambda holder: None):
        waiter = subprocess.Popen(
            [sys.executable, "-c", code], env=helpers.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert waiter.stderr is not None
        assert waiter.stderr.readline().endswith(" was never built\n")
        assert waiter.stderr.readline() == "opjit: building keytest::plus for cpu " + targets.here(helpers.cpu()).folder + "\n"
        assert f"opjit: waiting for keytest::plus: process {os.getpid()}, which has been building it since" in waiter.stderr.readline()
        build.build(recipe, Store(here))
    out, err = waiter.communicate(timeout=60)
    assert (waiter.returncode, out) == (0, "[2.0]\n"), err
    assert " was built meanwhile: " in err
    assert len(log.read_text().split()) == 1


# --- forks -------------------------------------------------------------------------------------------------------------------------


def test_a_child_forked_while_another_thread_builds_can_get_ops_and_has_its_own_settings_back(
    op: Path, here: Path, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    slow = fake_compiler(tmp_path / "slow-cc", before=f"if {helpers.COMPILES} && mkdir '{reached}' 2>/dev/null; then sleep 1; fi")
    code = (
        helpers.declare(op)
        + f"""
import gc, os, sys, threading, time, signal
from torch.utils import cpp_extension
torch.set_num_threads(1)
os.environ["CC"] = {str(slow)!r}
before = dict(os.environ), cpp_extension.TORCH_LIB_PATH, cpp_extension.CUDA_HOME
builder = threading.Thread(target=lambda: opjit.get("keytest::plus", "cpu"))
builder.start()
while not os.path.exists({str(reached)!r}):
    time.sleep(0.01)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a deadlock kills the child
    same = (dict(os.environ), cpp_extension.TORCH_LIB_PATH, cpp_extension.CUDA_HOME) == before and gc.isenabled()
    other = opjit.get("allreduce", "cpu")(torch.ones(3)).item() == 3
    plus = opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist() == [2.0]
    os._exit(0 if same and other and plus else 10 + 4 * same + 2 * other + plus)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
builder.join()
print(code, opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist())
"""
    )
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning")).stdout == "0 [2.0]\n"


def test_while_a_thread_builds_the_environment_of_the_process_stays_as_it_is(op: Path, here: Path, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    slow = fake_compiler(tmp_path / "slow-cc", before=f"if {helpers.COMPILES}; then touch '{reached}'; sleep 1; fi")
    code = (
        helpers.declare(op)
        + f"""
import os, threading, time
os.environ["CC"] = {str(slow)!r}
before = dict(os.environ)
builder = threading.Thread(target=lambda: opjit.get("keytest::plus", "cpu"))
builder.start()
while not os.path.exists({str(reached)!r}):
    time.sleep(0.01)
print(dict(os.environ) == before, builder.is_alive())
"""
    )
    assert fresh(code).stdout == "True True\n"


@pytest.mark.parametrize("module", ["opjit.commands", "opjit.build", "opjit.lock", "torch.utils.cpp_extension"])
def test_a_child_forked_while_another_thread_imports_what_a_build_needs_can_build(module: str, op: Path, here: Path) -> None:
    code = (
        helpers.declare(op)
        + f"""
import importlib.machinery, os, signal, sys, threading, time
torch.set_num_threads(1)
reached = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r} or reached.is_set():
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def slow(module):
            reached.set()
            time.sleep(1)
            run(module)
        spec.loader.exec_module = slow
        return spec

sys.meta_path.insert(0, Slow())
builder = threading.Thread(target=lambda: opjit.get("allreduce", "cpu"))
builder.start()
reached.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(30)  # a deadlock kills the child
    os._exit(0 if opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist() == [2.0] else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
builder.join()
print(code, opjit.get("allreduce", "cpu")(torch.ones(3)).item())
"""
    )
    done = fresh(code, flags=("-W", "ignore::DeprecationWarning"))
    assert done.stdout == "0 3.0\n"
    assert "registration.py" not in done.stderr, done.stderr  # of the fork's hooks


def test_a_build_for_the_cpu_starts_no_cuda_that_a_forked_child_could_not_use(here: Path) -> None:
    """Torch's builder asks whether there is a GPU. Here a torch with CUDA is played, on a machine with a driver."""
    code = """
import os
def start():
    raise SystemExit("CUDA was started")
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: 1
torch._C._cuda_getDeviceCount = start
torch.version.cuda = "13.0"
os.environ["CUDA_HOME"] = "/usr/local/cuda"
before = dict(os.environ)
print(opjit.get("allreduce", "cpu")(torch.ones(3)).item(), dict(os.environ) == before)
"""
    assert fresh("import opjit, torch\n" + code).stdout == "3.0 True\n"


@pytest.mark.parametrize("build", [
    'opjit.get("allreduce", "cpu")',
    'opjit.load("forked", ["forked.cpp"], is_python_module=False)',
])
def test_children_forked_while_another_thread_starts_compilers_do_not_keep_its_build_waiting(
    build: str, here: Path, tmp_path: Path
) -> None:
    """For as long as they live: they would have the ends of the pipes from the compilers, and to them."""
    (tmp_path / "forked.cpp").write_text("int forked;")
    code = f"""
import os, queue, signal, subprocess, threading, time
import torch, opjit
torch.set_num_threads(1)
moments, children = queue.SimpleQueue(), []

def slow(function):
    def called(*arguments, **others):
        moments.put("there are pipes")
        time.sleep(0.3)
        return function(*arguments, **others)
    return called

def work():
    {build}
    moments.put("built")

subprocess.Popen._execute_child = slow(subprocess.Popen._execute_child)
subprocess.Popen.communicate = slow(subprocess.Popen.communicate)
threading.Thread(target=work, daemon=True).start()
try:
    while moments.get(timeout=20) != "built":
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        children.append(child)
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
print(len(children) >= 4)
"""
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning"), cwd=tmp_path).stdout == "True\n"


def test_a_child_forked_by_the_holder_of_a_lock_neither_holds_nor_frees_it(here: Path) -> None:
    code = """
import os, time
from opjit import lock
with lock.held("key", lambda holder: None):
    child = os.fork()
    if child == 0:
        time.sleep(1.5)
        os._exit(0)
freed = time.monotonic()
with lock.held("key", lambda holder: print("waited")):
    print(time.monotonic() - freed < 1)
os.waitpid(child, 0)
"""
    assert fresh(code).stdout == "True\n"


def test_an_op_got_before_a_fork_works_in_the_child(op: Path, here: Path) -> None:
    code = (
        helpers.declare(op)
        + """
import os
plus = opjit.get("keytest::plus", "cpu")
child = os.fork()
if child == 0:
    os._exit(0 if plus(torch.ones(1)).tolist() == [2.0] == opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert fresh(code).stdout == "0\n"


# --- the lock's own folder -----------------------------------------------------------------------------------------------------------


def test_the_lock_s_folder_is_the_user_s_alone(here: Path) -> None:
    assert hold() == []
    assert lock.folder().stat().st_mode & 0o777 == 0o700
    assert (lock.folder() / "key.lock").stat().st_mode & 0o077 == 0


def test_a_link_planted_as_a_lock_file_is_not_followed(here: Path, tmp_path: Path) -> None:
    hold()
    (tmp_path / "precious").write_text("content")
    (lock.folder() / "key.lock").unlink()
    (lock.folder() / "key.lock").symlink_to(tmp_path / "precious")
    assert len(hold()) == 1
    assert (tmp_path / "precious").read_text() == "content"
    (lock.folder() / "key.lock").unlink()
    (lock.folder() / "key.lock").symlink_to(tmp_path / "missing")
    assert len(hold()) == 1
    assert not (tmp_path / "missing").exists()


def test_a_link_planted_as_the_holder_s_note_is_replaced_and_not_followed(here: Path, tmp_path: Path) -> None:
    hold()
    (tmp_path / "precious").write_text("content")
    (lock.folder() / "key.json").symlink_to(tmp_path / "precious")
    assert hold() == []
    assert (tmp_path / "precious").read_text() == "content"


@pytest.mark.parametrize("bad", ["another-user", "link", "file", "group-writable"])
def test_a_lock_folder_that_is_not_the_user_s_is_not_used(op: Path, here: Path, tmp_path: Path, bad: str) -> None:
    folder = lock.folder()
    if bad == "file":
        folder.write_text("")
    elif bad == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
        if bad == "group-writable":
            folder.chmod(0o775)
        elif os.geteuid() == 0:
            os.chown(folder, 12345, 12345)
        else:
            pytest.skip("only root can give a folder to another user")
    (warning,) = hold()
    assert "without a lock" in warning
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_an_unusable_tmpdir_costs_the_lock_and_one_warning(make_op: MakeOp, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks in $TMPDIR, /tmp, /var/tmp, /usr/tmp and the working folder; root can write to all of them."""

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    op = make_op("add(Tensor x) -> Tensor", ADD % 1, fake=torch.empty_like)
    with cache_warnings() as texts:
        entry = api.entry(op, targets.here(helpers.cpu()))
    assert len(texts) == 1
    assert entry.folder.is_relative_to(here)


def test_an_op_builds_where_tmpdir_names_no_folder(op: Path, here: Path) -> None:
    code = helpers.declare(op) + "warnings.simplefilter('error')\nprint(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())"
    assert fresh(code, {"TMPDIR": "/nonexistent/folder"}).stdout == "[2.0]\n"


@pytest.mark.parametrize(
    "error", [OSError(38, "Function not implemented"), OSError(37, "No locks available"), NotImplementedError("no locks")]
)
def test_a_filesystem_without_locks_costs_one_warning(here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import fcntl

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(fcntl, "flock", fail)
    assert len(hold()) == 1


@pytest.mark.parametrize(
    "note",
    ["", "{", "[]", "null", '{"pid": "x"}', '{"pid": 1}', '{"pid": 1, "since": "y"}', '{"pid": 1e999, "since": 0, "step": "x"}',
     '{"pid": 1, "since": 1e999, "step": "x"}', '{"pid": 1, "since": 0}', "\udc80"],
)
def test_a_damaged_note_about_the_holder_is_no_trouble(here: Path, note: str) -> None:
    hold()
    (lock.folder() / "key.json").write_text(note, errors="surrogateescape")
    assert "another process" in lock._words(lock.holder(lock.folder() / "key.json"))


def test_the_holder_s_note_is_there_while_the_lock_is_held_and_gone_after(here: Path) -> None:
    with lock.held("key", lambda holder: None):
        assert json.loads((lock.folder() / "key.json").read_text())["pid"] == os.getpid()
    assert not (lock.folder() / "key.json").exists()


# --- what takes long -----------------------------------------------------------------------------------------------------------------


def test_whoever_builds_or_waits_for_long_is_told_once_of_what_though_no_log_was_asked_for(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = tmp_path / "reached", tmp_path / "go"
    slow = f"if {helpers.COMPILES}; then touch '{reached}'; while ! [ -e '{go}' ]; do sleep 0.1; done; fi"
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "slow-cc", before=slow)))
    code = helpers.declare(op) + "from opjit import progress; progress.LONG = 2.0; opjit.get('keytest::plus', 'cpu')"
    with helpers.process(code) as builder:
        until(reached.exists, process=builder)
        with helpers.process(code) as waiter:
            target = targets.here(helpers.cpu())
            assert builder.stderr is not None
            assert waiter.stderr is not None
            assert builder.stderr.readline() == f"2 s, and process {builder.pid} is still building keytest::plus for {target}\n"
            assert re.fullmatch(f"2 s, and process {waiter.pid} is still waiting for keytest::plus: process {builder.pid}, which has been "
                                r"building it since \d\d:\d\d:\d\d \(compiling\)\n", waiter.stderr.readline())
            go.touch()
            assert builder.communicate(timeout=60) == ("", "")
            assert waiter.communicate(timeout=60) == ("", "")


# --- interrupts ----------------------------------------------------------------------------------------------------------------------


def test_an_interrupted_build_ends_its_compilers(op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this process is interrupted, as in a notebook; at a terminal, Ctrl-C reaches the compilers too."""
    pids = tmp_path / "pids"
    hang = f"if {helpers.COMPILES}; then echo $$ > '{pids}'; sleep 100; fi"
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "slow-cc", before=hang)))
    code = f"import opjit; opjit.add_path({str(op)!r})\ntry:\n    opjit.get('keytest::plus', 'cpu')\nexcept KeyboardInterrupt:\n    input()"
    with helpers.process(code) as running:
        until(lambda: pids.exists() and pids.read_text() != "", process=running)
        time.sleep(0.5)  # for it to come from the start of ninja to the wait for its end
        os.kill(running.pid, signal.SIGINT)
        until(lambda: not is_alive(int(pids.read_text())), 20, running)
        until(lambda: list((here / "v1" / "staging").iterdir()) == [], 20, running)


def test_opjit_get_that_is_sent_sigterm_ends_its_compilers_and_leaves_nothing_half_done(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    hang = f"if {helpers.COMPILES}; then echo $$ > '{pids}'; sleep 100; fi"
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "slow-cc", before=hang)))
    with helpers.process(f"from opjit.cli import main; main(['get', {str(op)!r}])") as running:
        until(lambda: pids.exists() and pids.read_text() != "", process=running)
        time.sleep(0.5)  # as above
        os.kill(running.pid, signal.SIGTERM)
        told = "interrupted by SIGTERM; what was built stays, and the same command goes on from there\n"
        assert running.communicate(timeout=20) == ("", told)
        assert running.returncode == 128 + signal.SIGTERM
        assert not is_alive(int(pids.read_text()))
        assert list((here / "v1" / "staging").iterdir()) == []


def test_opjit_get_works_in_a_thread_which_can_heed_no_signals(here: Path) -> None:
    done = fresh("""
import threading
from opjit.cli import main
thread = threading.Thread(target=main, args=(["get", "allreduce", "--device", "cpu"],), kwargs={"standalone_mode": False})
thread.start()
thread.join()
""")
    assert done.stdout.endswith(".so\n")


def test_opjit_get_under_nohup_goes_on_at_a_sighup(op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = tmp_path / "reached"
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "slow-cc", before=f"if {helpers.COMPILES}; then touch '{reached}'; sleep 1; fi")))
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with helpers.process(f"{ignoring}; from opjit.cli import main; main(['get', {str(op)!r}])") as running:
        until(reached.exists, process=running)
        os.kill(running.pid, signal.SIGHUP)
        assert running.communicate(timeout=60)[0].endswith(".so\n")

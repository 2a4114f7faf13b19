"""Many at once: processes, threads, forks and builders that die. A build happens once, and no death blocks the next."""

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import lock, progress
from opjit.backends import targets
from opjit.builder import build
from opjit.store import elf, manifest
from opjit.store.store import Store
from tests import helpers
from tests.helpers import (
    OUTPUT,
    MakeOp,
    OnCompile,
    elementwise,
    fake_compiler,
    fresh,
    is_alive,
    program,
    until,
)

# Forks children that start together; each runs `work`, which returns what is printed as one of a sorted list.
TOGETHER = """
import hashlib, json, os, sys
from torch.utils import cpp_extension  # before the forks, to stay light
from opjit.store import manifest
torch.set_num_threads(1)
def together(count, work):
    go, told = os.pipe(), os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                os.close(go[1])
                os.read(go[0], 1)  # returns when the parent closes the other end
                warnings.simplefilter("error")
                os.write(told[1], (work() + "\\n").encode())
                os._exit(0)
            except BaseException as error:
                print(type(error), error, file=sys.stderr, flush=True)
                os._exit(4)
        children.append(child)
    os.close(go[0]), os.close(go[1]), os.close(told[1])
    with open(told[0]) as file:
        lines = sorted(file.read().split())
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count
    return lines
"""


@pytest.mark.slow
def test_64_processes_and_then_16_compile_once_in_each_round_and_read_identical_bytes(
    op: Path, here: Path, log: Path
) -> None:
    rounds = 4
    code = (
        helpers.declare(op)
        + TOGETHER
        + f"""
folder, cache = Path({str(op)!r}), Path({str(here)!r})
for turn in range({rounds}):
    (folder / "amount.h").write_text(f"#define AMOUNT {{turn}}.0f\\n")
    def work():
        assert opjit.get("keytest::plus", "cpu")(torch.ones(2)).tolist() == [turn + 1.0] * 2
        (mapped,) = {{line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("keytest.plus.so")}}
        return hashlib.sha256(Path(mapped).read_bytes()).hexdigest()
    print(len(set(together(16 if turn else 64, work))), flush=True)
"""
    )
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning")).stdout == "1\n" * rounds
    assert len(log.read_text().split()) == rounds
    assert len(helpers.entries(here)) == rounds


def test_32_threads_that_ask_for_one_op_compile_it_once(
    make_op: MakeOp, here: Path, log: Path
) -> None:
    op = make_op(
        "add(Tensor x) -> Tensor", elementwise("add", "from[i] + 1"), fake=torch.empty_like
    )
    barrier = threading.Barrier(32)

    def ask(number: int) -> bool:
        barrier.wait()
        x = torch.full((4,), float(number))
        # The other half comes through the first dispatch.
        got = opjit.get(op.qualified, "cpu") if number % 2 else op
        return torch.equal(got(x), x + 1)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(ask, range(32)))
    assert len(log.read_text().split()) == 1


def state() -> Any:
    """What torch's builder changes in a process."""
    from torch.utils import cpp_extension

    level = logging.getLogger("torch.utils.cpp_extension").level
    return (
        dict(os.environ),
        cpp_extension.TORCH_LIB_PATH,
        cpp_extension.CUDA_HOME,
        level,
        os.getcwd(),
        sorted(sys.path),
    )


def test_different_ops_built_in_threads_at_once_are_all_right(make_op: MakeOp, here: Path) -> None:
    before = state()
    ops = [
        make_op(
            "add(Tensor x) -> Tensor",
            elementwise("add", f"from[i] + {amount}"),
            fake=torch.empty_like,
        )
        for amount in range(8)
    ]
    barrier = threading.Barrier(8)

    def ask(amount: int) -> float:
        barrier.wait()
        return float(opjit.get(ops[amount].qualified, "cpu")(torch.ones(1)).item())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [1.0 + amount for amount in range(8)]
    assert state() == before


def test_a_build_leaves_the_environment_and_torch_s_builder_as_they_were_also_when_it_fails(
    op: Path, tmp_path: Path
) -> None:
    before = state()
    helpers.built(op, tmp_path / "cache")
    assert state() == before
    (op / "plus.c").write_text("nonsense")
    with pytest.raises(opjit.errors.CompileError):
        helpers.built(op, tmp_path / "cache")
    assert state() == before


@pytest.mark.parametrize("whole_group", [True, False])
def test_a_killed_builder_s_waiter_builds_at_once(
    op: Path, here: Path, on_compile: OnCompile, whole_group: bool
) -> None:
    reached = here.with_name("reached")
    on_compile(f"mkdir '{reached}' 2>/dev/null && sleep 30")  # only the first to come here
    from torch.utils import cpp_extension  # noqa: F401 - not part of the time measured below

    victim = helpers.started(helpers.declare(op) + "opjit.get('keytest::plus', 'cpu')")
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
    victim.end()
    assert waited < 20  # the poll is 0.05 s; a lock that is not freed is waited for much longer
    assert len(waits) == 1
    assert re.fullmatch(
        rf"process {victim.pid}, which has been building it since \d\d:\d\d:\d\d \(compiling\)",
        waits[0],
    )
    assert helpers.caught(op, here) == helpers.Caught(entry, [])


@pytest.mark.slow
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
        assert time.monotonic() - began < 60, moment  # a compiler that was just being started may keep the lock for a moment
    first = helpers.caught(folder, cache)
    assert first.warnings == [], (moment, first)
    assert helpers.caught(folder, cache) == first
print("done")
"""
    )
    assert fresh(code).stdout == "done\n"


def test_a_waiter_finds_what_the_holder_built_and_says_whom_and_which_step_it_waited_for(
    op: Path, here: Path, log: Path
) -> None:
    code = helpers.declare(op) + "import os\nos.environ['OPJIT_VERBOSE'] = '1'\n" + helpers.GET
    recipe = helpers.describe(op)
    assert recipe.key is not None
    with lock.held(recipe.key, lambda holder: None):
        waiter = helpers.started(code)
        assert waiter.stderr.readline().endswith(" was never built\n")
        assert (
            waiter.stderr.readline()
            == "opjit: building keytest::plus for cpu " + targets.here(helpers.cpu()).folder + "\n"
        )
        assert (
            f": process {os.getpid()}, which has been building it since" in waiter.stderr.readline()
        )
        progress.step("publishing")
        assert waiter.stderr.readline().endswith("(publishing)\n")
        build.build(recipe, Store(here))
    out, err = waiter.communicate()
    assert (waiter.returncode, out) == (0, "[2.0]\n"), err
    assert " is built already: " in err
    assert len(log.read_text().split()) == 1


def test_while_a_thread_builds_the_environment_stays_as_it_is_and_a_forked_child_can_get_ops(
    op: Path, here: Path, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    slow = fake_compiler(
        tmp_path / "slow-cc",
        before=f"if {helpers.COMPILES} && mkdir '{reached}' 2>/dev/null; then sleep 1; fi",
    )
    code = (
        helpers.declare(op)
        + f"""
import os, sys, threading, time, signal
from torch.utils import cpp_extension
torch.set_num_threads(1)
held = opjit.get("allreduce", "cpu")
os.environ["CC"] = {str(slow)!r}
before = dict(os.environ), cpp_extension.TORCH_LIB_PATH, cpp_extension.CUDA_HOME
builder = threading.Thread(target=lambda: opjit.get("keytest::plus", "cpu"))
builder.start()
while not os.path.exists({str(reached)!r}):
    time.sleep(0.01)
print(dict(os.environ) == before[0], builder.is_alive())
child = os.fork()
if child == 0:
    signal.alarm(60)  # a deadlock kills the child
    same = (dict(os.environ), cpp_extension.TORCH_LIB_PATH, cpp_extension.CUDA_HOME) == before
    other = (held(torch.ones(3)).item(), opjit.get("tensor_negate", "cpu")(torch.ones(1)).item()) == (3, -1)
    plus = opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist() == [2.0]
    os._exit(0 if same and other and plus else 10 + 4 * same + 2 * other + plus)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
builder.join()
print(code, opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist())
"""
    )
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning")).stdout == "True True\n0 [2.0]\n"


@pytest.mark.parametrize("module", ["opjit.builder.publish", "opjit.builder.build", "opjit.lock"])
def test_a_child_forked_while_another_thread_imports_what_a_build_needs_can_build(
    module: str, op: Path, here: Path
) -> None:
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
assert reached.wait(60)
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
    assert "processes.py" not in done.stderr, done.stderr  # of the fork's hooks


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


@pytest.mark.parametrize(
    "build",
    [
        'opjit.get("allreduce", "cpu")',
        'opjit.load("forked", ["forked.cpp"], is_python_module=False)',
    ],
)
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
    while moments.get() != "built":
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


def test_a_long_build_or_wait_is_reported_once_even_without_a_log(
    op: Path, here: Path, on_compile: OnCompile
) -> None:
    reached = here.with_name("reached")
    go = here.with_name("go")
    on_compile(f"touch '{reached}'; while ! [ -e '{go}' ]; do sleep 0.1; done")
    code = (
        helpers.declare(op)
        + "from opjit import progress; progress.LONG = 2.0; opjit.get('keytest::plus', 'cpu')"
    )
    with helpers.process(code) as builder:
        until(reached.exists, process=builder)
        with helpers.process(code) as waiter:
            target = targets.here(helpers.cpu())
            assert (
                builder.stderr.readline()
                == f"2 s, and process {builder.pid} is still building keytest::plus for {target}\n"
            )
            assert re.fullmatch(
                f"2 s, and process {waiter.pid} is still waiting for keytest::plus for cpu \\S+: process {builder.pid}, "
                r"which has been building it since \d\d:\d\d:\d\d \(compiling\)\n",
                waiter.stderr.readline(),
            )
            go.touch()
            assert builder.communicate() == ("", "")
            assert waiter.communicate() == ("", "")


def test_an_interrupted_build_ends_its_compilers(
    op: Path, here: Path, on_compile: OnCompile
) -> None:
    """Only this process is interrupted, as in a notebook; at a terminal, Ctrl-C reaches the compilers too."""
    pids = here.with_name("pids")
    on_compile(f"echo $$ > '{pids}'; sleep 100")
    code = f"import opjit; opjit.add_path({str(op)!r})\ntry:\n    opjit.get('keytest::plus', 'cpu')\nexcept KeyboardInterrupt:\n    input()"
    with helpers.process(code) as running:
        until(lambda: pids.exists() and pids.read_text() != "", process=running)
        time.sleep(0.5)  # for it to come from the start of ninja to the wait for its end
        os.kill(running.pid, signal.SIGINT)
        until(lambda: not is_alive(int(pids.read_text())), 20, running)
        until(lambda: list((here / "v2" / "staging").iterdir()) == [], 20, running)


@pytest.mark.slow
def test_two_builds_that_differ_are_never_mixed(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock, so that they do race; one more process looks at every entry from the moment that it appears."""
    made = tmp_path / "made"
    rounds = 5
    made.mkdir()
    noise = "-Wl,--build-id=0x$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')"
    monkeypatch.setenv(
        "CC",
        str(
            program(
                tmp_path / "cc",
                f"""\
        #!/bin/sh
        if {helpers.LINKS}; then
            {OUTPUT}
            '{helpers.real_compiler()}' "$@" {noise} && cp "$out" "$(mktemp '{made}/XXXXXX')"
        else
            exec '{helpers.real_compiler()}' "$@"
        fi
        """,
            )
        ),
    )
    code = (
        "import fcntl\nfcntl.flock = lambda descriptor, operation: None\n"
        + helpers.declare(op)
        + TOGETHER
        + f"""
folder, cache = Path({str(op)!r}), Path({str(here)!r})
def agrees(entry):
    described = json.loads((entry / "manifest.json").read_bytes())
    assert hashlib.sha256((entry / described["library"]).read_bytes()).hexdigest() == described["sha256"], entry
    return described["sha256"]
watcher = os.fork()
if watcher == 0:
    while not (cache / "done").exists():
        for entry in cache.glob("v2/keytest.plus/*/*"):
            agrees(entry)
    os._exit(0)
for turn in range({rounds}):
    (folder / "amount.h").write_text(f"#define AMOUNT {{turn}}.0f\\n")
    def work():
        assert opjit.get("keytest::plus", "cpu")(torch.ones(2)).tolist() == [turn + 1.0] * 2
        (mapped,) = {{line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("keytest.plus.so")}}
        return agrees(Path(mapped).parent)
    print(len(set(together(2, work))), flush=True)
(cache / "done").touch()
print(os.waitpid(watcher, 0)[1], flush=True)
"""
    )
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning")).stdout == "1\n" * rounds + "0\n"
    linked = {
        hashlib.sha256(elf.without_run_path(library.read_bytes())).hexdigest()
        for library in made.iterdir()
    }
    assert len(linked) > rounds, "no two builders raced"
    assert {
        json.loads((entry / manifest.NAME).read_bytes())["sha256"]
        for entry in helpers.entries(here)
    } <= linked


@pytest.mark.slow
def test_a_storm_of_processes_and_kills_leaves_right_results_and_a_clean_store() -> None:
    """A short one; the long one is tests/benchmarks/storm.py."""
    script = helpers.ROOT / "tests" / "benchmarks" / "storm.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rounds", "1", "--processes", "18", "--ops", "3"],
        env=helpers.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("PASS", done.stdout)) == 6

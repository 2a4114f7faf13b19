"""The lock: a waiting process names the holder, and never waits without end, also if the holder dies or flock fails."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from opjit import files, lock, progress
from opjit.builder import build
from opjit.store.store import Store
from tests import helpers, zygote
from tests.helpers import GET, OnCompile, as_root, fresh, good, hold, process, tmpfs, until
from tests.locks import is_held

pytestmark = pytest.mark.usefixtures("here")
# A process that holds the lock of "key" until its standard input ends.
HOLDER = """
import sys
from opjit import progress
from opjit import files, lock
lock.HEARTBEAT = 0.1
with lock.held("key", lambda holder: print("waits", flush=True)):
    print("holds", flush=True)
    for line in sys.stdin:
        progress.step(line.strip())
"""


@contextmanager
def holder() -> Iterator[zygote.Process]:
    with process(HOLDER) as running:
        assert line(running) == "holds"
        yield running


def line(running: zygote.Process) -> str:
    return running.stdout.readline().strip()


def is_free() -> bool:
    return not is_held(files.local_folder() / "key.lock")


def test_a_waiter_is_told_whom_it_waits_for_since_when_and_each_step_and_takes_over_from_the_dead() -> (
    None
):
    told: list[str] = []
    with holder() as running:
        steps = iter(["checking", "publishing"])

        def waiting(text: str) -> None:
            told.append(text)
            step = next(steps, None)
            if step is not None:
                running.send(step)
            else:
                os.kill(running.pid, signal.SIGKILL)

        assert hold("key", waiting) == []
        found = [
            re.fullmatch(
                rf"process {running.pid}, which has been building it since \d\d:\d\d:\d\d \((\w+)\)",
                text,
            )
            for text in told
        ]
    assert [match and match[1] for match in found] == ["compiling", "checking", "publishing"]


def test_a_build_tells_its_steps_in_order(op: Path, here: Path) -> None:
    steps: list[str] = []
    with progress.on(progress.STEP, steps.append):
        build.build(helpers.describe(op), Store(here))
    progress.step("nobody listens")
    assert steps == ["compiling", "checking", "publishing"]


def test_an_op_whose_builder_was_stopped_is_built_and_both_use_one_entry(
    op: Path, here: Path, on_compile: OnCompile
) -> None:
    reached = here.with_name("reached")
    on_compile(f"echo >> '{reached}'")
    build_it = (
        helpers.declare(op)
        + "from opjit import lock\nlock.HEARTBEAT_TIMEOUT = 1.0\nwarnings.simplefilter('always')\n"
        + GET
    )
    with process(build_it) as stopped:
        until(reached.exists)
        os.killpg(stopped.pid, signal.SIGSTOP)
        done = fresh(build_it)
        assert done.stdout == "[2.0]\n"
        assert done.stderr.count("CacheWarning") == 1
        assert "not shown any progress" in done.stderr
        os.killpg(stopped.pid, signal.SIGCONT)
        assert stopped.communicate() == ("[2.0]\n", "")
    assert good(here) == ["keytest::plus"]
    assert len(reached.read_text().split("\n")) - 1 == 2


@pytest.mark.slow
def test_a_compiler_that_works_for_long_is_waited_for(
    op: Path, here: Path, on_compile: OnCompile
) -> None:
    reached = here.with_name("reached")
    done = here.with_name("done")
    on_compile(f"mkdir '{reached}' 2>/dev/null && until [ -e '{done}' ]; do sleep 0.1; done")
    code = helpers.declare(op) + (
        "from opjit import lock\nlock.HEARTBEAT_TIMEOUT, lock.HEARTBEAT = 1.5, 0.1\nwarnings.simplefilter('error')\n"
        "print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist(), flush=True)"
    )
    with process(code) as builder:
        until(reached.exists)
        with process(code) as waiter:
            with pytest.raises(subprocess.TimeoutExpired):
                waiter.wait(4.5)
            done.touch()
            assert waiter.communicate() == ("[2.0]\n", "")
        assert builder.communicate() == ("[2.0]\n", "")


def test_a_waiter_that_is_interrupted_leaves_nothing_behind() -> None:
    with holder() as running:
        with pytest.raises(KeyboardInterrupt):
            hold("key", Mock(side_effect=KeyboardInterrupt))
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    until(lambda: not any(thread.name == "opjit-lock" for thread in threading.enumerate()))
    assert is_free()
    assert hold() == []


def test_an_error_in_the_build_frees_the_lock() -> None:
    with pytest.raises(ZeroDivisionError), lock.held("key", lambda holder: None):
        raise ZeroDivisionError
    assert is_free()
    assert not any(thread.name == "opjit-lock" for thread in threading.enumerate())


@pytest.mark.slow
def test_a_flock_that_always_succeeds_gives_duplicate_builds_and_one_good_entry(
    op: Path, here: Path, on_compile: OnCompile
) -> None:
    log = here.with_name("log")
    on_compile(f"echo >> '{log}'; sleep 1")
    code = (
        helpers.declare(op)
        + "import fcntl\nfcntl.flock = lambda descriptor, operation: None\nwarnings.simplefilter('error')\n"
        + GET
    )
    running = [helpers.started(code) for _ in range(6)]
    assert [process.communicate() for process in running] == [("[2.0]\n", "")] * 6
    assert len(log.read_text()) > 1
    assert good(here) == ["keytest::plus"]


def test_a_flock_that_blocks_costs_a_bounded_wait_and_a_warning_and_stops_no_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_TIMEOUT", 1.0)
    plain = fcntl.flock
    gate = threading.Event()

    def flock(descriptor: int, operation: int) -> None:
        assert gate.wait(60)
        plain(descriptor, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        (warning,) = hold()
        assert "without a lock" in warning
        assert "not shown any progress" in warning
        with warnings.catch_warnings():
            # Python 3.12 warns of the thread that still waits.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        gate.set()  # it gets an answer after all, which nobody wants any more
        until(lambda: not any(thread.name == "opjit-lock" for thread in threading.enumerate()))
    assert hold() == []
    assert is_free()


@as_root
def test_a_full_filesystem_of_locks_costs_one_warning(op: Path, here: Path) -> None:
    files.local_folder().mkdir(mode=0o700)
    with tmpfs(files.local_folder(), "nr_inodes=1"):
        done = fresh(helpers.declare(op) + "warnings.simplefilter('default')\n" + GET)
    assert done.stdout == "[2.0]\n"
    assert done.stderr.count("CacheWarning") == 1
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert len(helpers.entries(here)) == 1


def test_a_child_that_leaves_the_block_of_its_parent_does_not_free_the_lock() -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
from opjit import progress
from opjit import files, lock
with lock.held("key", str):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(os.path.exists(files.local_folder() / "key.note"), flush=True)
        sys.stdin.read()
    else:
        progress.step("a step of the child")
"""
    with process(code) as running:
        assert line(running) == "True"
        assert not is_free()
        running.send("")
        assert running.stdin is not None
        running.stdin.close()
        until(is_free)


def test_a_child_of_a_holder_that_was_killed_does_not_keep_the_lock() -> None:
    code = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from opjit import files, lock
with lock.held("key", str):
    if os.fork() == 0:
        print("forked", flush=True)
        time.sleep(60)
    time.sleep(60)
"""
    with process(code) as running:
        assert line(running) == "forked"
        os.kill(running.pid, signal.SIGKILL)  # the parent alone
        until(is_free)
        os.killpg(running.pid, signal.SIGKILL)


def test_the_lock_s_folder_is_the_user_s_alone_and_the_note_goes_with_the_lock(here: Path) -> None:
    with lock.held("key", lambda holder: None):
        assert f"process {os.getpid()}, " in (files.local_folder() / "key.note").read_text()
    assert not (files.local_folder() / "key.note").exists()
    assert files.local_folder().stat().st_mode & 0o777 == 0o700
    assert (files.local_folder() / "key.lock").stat().st_mode & 0o077 == 0


def test_a_link_planted_as_a_lock_file_or_a_note_is_not_followed(
    here: Path, tmp_path: Path
) -> None:
    hold()
    (tmp_path / "precious").write_text("content")
    (files.local_folder() / "key.lock").unlink()
    (files.local_folder() / "key.lock").symlink_to(tmp_path / "precious")
    assert len(hold()) == 1
    assert (tmp_path / "precious").read_text() == "content"
    (files.local_folder() / "key.lock").unlink()
    (files.local_folder() / "key.lock").symlink_to(tmp_path / "missing")
    assert len(hold()) == 1
    assert not (tmp_path / "missing").exists()
    (files.local_folder() / "key.lock").unlink()
    (files.local_folder() / "key.note").symlink_to(
        tmp_path / "precious"
    )  # the holder's note is replaced
    assert hold() == []
    assert (tmp_path / "precious").read_text() == "content"


@pytest.mark.parametrize("bad", ["another-user", "link", "file", "group-writable"])
def test_a_lock_folder_that_is_not_the_user_s_is_not_used(
    op: Path, here: Path, tmp_path: Path, bad: str
) -> None:
    folder = files.local_folder()
    if bad == "file":
        folder.write_text("")
    elif bad == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
        if bad == "group-writable":
            helpers.open_to_group(folder)
        elif os.geteuid() == 0:
            os.chown(folder, 12345, 12345)
        else:
            pytest.skip("only root can give a folder to another user")
    (warning,) = hold()
    assert "without a lock" in warning
    assert not folder.is_dir() or list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        *(
            (fcntl, "flock", error)
            for error in (
                OSError(38, "Function not implemented"),
                OSError(37, "No locks available"),
                NotImplementedError("no locks"),
            )
        ),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
    ],
)
def test_a_filesystem_without_locks_or_a_process_without_threads_costs_one_warning_that_says_so(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception
) -> None:
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    (warning,) = hold()
    assert str(error) in warning


@pytest.mark.parametrize("note", ["", "\x1b[2J", "\n", "x" * 1000, "\udc80"])
def test_a_damaged_note_about_the_holder_is_not_shown(here: Path, note: str) -> None:
    hold()
    (files.local_folder() / "key.note").write_text(note, errors="surrogateescape")
    assert lock.holder(files.local_folder() / "key.note") == "another process, which is building it"

"""Commands in programs that treat signals in ways of their own."""

import os
import time
from pathlib import Path

import pytest

import opjit
from opjit.errors import DeclarationError
from tests import helpers
from tests.helpers import fresh


@pytest.mark.parametrize("thread", [False, True], ids=["main-thread", "other-thread"])
def test_a_program_that_ignores_sigchld_builds_and_gets_the_compiler_s_complaint(
    op: Path, tmp_path: Path, thread: bool
) -> None:
    """As servers do: the system then forgets the exit codes of children."""
    code = helpers.declare(op) + (
        "import signal, threading, concurrent.futures\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "def call(function, *given):\n"
        f"    return concurrent.futures.ThreadPoolExecutor(1).submit(function, *given).result() if {thread} else function(*given)\n"
        "print(call(opjit.get, 'keytest::plus', 'cpu')(torch.ones(1)).tolist())\n"
        f"Path({str(op)!r}, 'plus.c').write_text('int broken')\n"
        "try: call(lambda: opjit.reload('keytest::plus', 'cpu'))\n"
        "except opjit.errors.CompileError as error: print('refused')\n"
        "print(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN, open('/proc/self/status').read().partition('SigIgn:\\t')[2][:16])\n"
    )
    told = fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout.splitlines()
    assert told[:2] == ["[2.0]", "refused"]
    assert told[2].startswith("True")
    assert int(told[2].split()[1], 16) >> 16 & 1, "SIGCHLD, 17, is ignored again"


def test_a_call_in_background_outlives_its_process_with_the_lowest_priority(tmp_path: Path) -> None:
    written = tmp_path / "written"
    script = f"echo said; sleep 1; nice >{written}.part; mv {written}.part {written}"
    code = (
        "import subprocess; from opjit import processes\n"
        f"processes.call_in_background(subprocess.check_call, ['sh', '-c', {script!r}])"
    )
    done = fresh(code, {})
    assert done.stdout + done.stderr == ""
    assert not written.exists()
    until = time.monotonic() + 60
    while not written.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert written.read_text() == "19\n"


def test_a_compiler_that_waits_for_a_pipe_s_silent_writer_is_ended(
    tmp_path: Path, here: Path
) -> None:
    pipe = tmp_path / "endless.h"
    os.mkfifo(pipe)
    source = f'#include "{pipe}"\nint one(void) {{ return 1; }}\n'
    writer = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(DeclarationError, match=f"{pipe} is a pipe or a device"):
            opjit.build("one", generated={"one.c": source})
    finally:
        os.close(writer)
    assert not list(here.glob("v2/staging/*"))
    assert not list(here.glob("v2/shared_library.one/*/*"))


def test_a_child_forked_while_another_thread_computes_inputs_can_compute_others() -> None:
    """Before Python 3.12, functools.cached_property has one lock for all objects, which the child would find held."""
    code = """
import os, signal, threading
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.reads import Places
class Slow(BuildInputs):
    def own_fields(self):
        if os.getpid() == parent:
            reached.set()
            done.wait(60)
        return {}
parent = os.getpid()
reached, done = threading.Event(), threading.Event()
inputs = [Slow("one", (), {}, Places("/"), {}, None, "") for _ in range(2)]
thread = threading.Thread(target=lambda: inputs[0].request)
thread.start()
assert reached.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(10)  # a deadlock kills the child
    os._exit(0 if inputs[1].request["inputs"] == {} else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
thread.join()
"""
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning")).stdout == "0\n"

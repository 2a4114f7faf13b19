"""Commands in programs that treat signals in ways of their own."""

from pathlib import Path

import pytest

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

"""The zygote's children are what fresh processes are: the same modules, environment, streams, paths, warnings, and ways to end."""

import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import ended, fresh, process

STATE = """
import json, os, sys, threading, warnings
import torch
print(json.dumps({"environment": dict(os.environ), "path": sys.path, "argv": sys.argv, "cwd": os.getcwd(), "modules": sorted(sys.modules),
                  "filters": repr(warnings.filters), "threads": threading.active_count(),
                  "bytecode": sys.dont_write_bytecode, "files": sorted(os.listdir("/proc/self/fd")), "streams": [
                      (stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.fileno(), stream.isatty())
                      for stream in (sys.stdin, sys.stdout, sys.stderr)]}))
"""


@pytest.mark.torch
def test_a_child_is_what_a_fresh_process_is_once_it_has_imported_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(["somewhere", "", os.environ.get("PYTHONPATH", "")])
    changes = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "NEW": "1", "HOME": None}
    forked, started = (
        json.loads(fresh(STATE, changes, cold=cold).stdout) for cold in (False, True)
    )
    assert set(forked["modules"]) ^ set(started["modules"]) <= {"runpy", "pkgutil", "zipimport"}
    assert "opjit" not in forked["modules"]
    for name in ("environment", "path", "argv", "cwd", "filters", "threads", "bytecode", "streams"):
        assert forked[name] == started[name], name
    assert set(forked["files"]) <= set(started["files"])


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("print('text')", 0, "text\n", ""),
        (
            "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)",
            3,
            "one\n",
            "two\n",
        ),
        ("raise SystemExit('the reason')", 1, "", "the reason\n"),
        (
            "def f():\n    1 / 0\nf()",
            1,
            "",
            'Traceback (most recent call last):\n  File "<string>", line 3, in <module>\n'
            '  File "<string>", line 2, in f\nZeroDivisionError: division by zero\n',
        ),
        ("import os; os._exit(7)", 7, "", ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('waited for'))).start()",
            0,
            "waited for\n",
            "",
        ),
        (
            "import os\nif os.fork() == 0: os.write(1, b'child ')\nelse: os.wait(); print('parent')",
            0,
            "child parent\n",
            "",
        ),
    ],
)
@pytest.mark.parametrize("cold", [False, True])
def test_a_child_ends_as_a_fresh_process_does(
    code: str, status: int, out: str, err: str, cold: bool
) -> None:
    done = ended(code, cold=cold)
    errors = re.sub(r"^    .*\n", "", done.stderr, flags=re.MULTILINE)  # Python 3.13 shows the code
    assert (done.returncode, done.stdout, errors) == (status, out, err)


def test_children_run_at_once_and_one_that_hangs_or_is_killed_is_no_trouble_to_the_others() -> None:
    with (
        process("print('started', flush=True); input(); print('ended')") as waiting,
        process("import time; time.sleep(60)") as hanging,
    ):
        assert waiting.stdout.readline() == "started\n"
        assert (waiting.poll(), hanging.poll()) == (None, None)
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.communicate(0.1)
        with ThreadPoolExecutor(4) as pool:
            assert [
                done.stdout for done in pool.map(lambda number: fresh(f"print({number})"), range(4))
            ] == ["0\n", "1\n", "2\n", "3\n"]
        os.killpg(hanging.pid, signal.SIGKILL)
        assert hanging.wait(10) == -signal.SIGKILL
        waiting.send("")
        assert waiting.communicate(10) == ("ended\n", "")
        assert waiting.poll() == 0


@pytest.mark.slow
def test_what_is_read_only_at_the_start_is_read_at_a_start() -> None:
    assert (
        fresh("import torch; print(torch.get_num_threads())", {"OMP_NUM_THREADS": "1"}).stdout
        == "1\n"
    )
    assert (
        fresh("import os, sys; print(sys.flags.dev_mode)", {"PYTHONDEVMODE": "1"}).stdout
        == "True\n"
    )

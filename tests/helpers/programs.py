"""Processes that tests start: Python, the command `opjit` and examples."""

import os
import pty
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import opjit
from opjit.cli import main
from tests import zygote

ROOT = Path(opjit.__file__).resolve().parents[1]
TIMEOUT = 800.0  # seconds that a process may take: on a busy machine a C++ extension takes minutes; pytest ends the test at 900


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's, with opjit importable and changes; None takes a variable away."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    values: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **(changes or {})}
    return {name: value for name, value in values.items() if value is not None}


def ended(
    code: str,
    changes: Mapping[str, str | None] | None = None,
    *,
    cold: bool = False,
    python: str = sys.executable,
    flags: tuple[str, ...] = (),
    user: int | None = None,
    cwd: Path | None = None,
    before: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, and wait for its end: a child of the zygote, where that is as good.

    It is not for what a test says of Python's start and end, of the import of torch, or of a process that no other forked: `cold`
    starts Python anew, and so do another Python, user or flag, a command before it, and variables that are read at the start."""
    code = textwrap.dedent(code)
    if cold or python != sys.executable or user is not None or before or set(flags[::2]) - {"-W"}:
        words = [*before, python, *flags, "-c", code, *arguments]
        return subprocess.run(
            words,
            env=environment(changes),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            user=user,
            cwd=cwd,
        )
    return _run("-c", code, changes, flags, cwd, arguments)


def fresh(
    code: str, changes: Mapping[str, str | None] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """The same for code that must exit with 0."""
    done = ended(code, changes, **how)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def command(*words: str | Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """The command `opjit` in a process of its own, however it ends; `changes` are of the environment."""
    return module("opjit", *words, changes=changes)


def on_terminal(*words: str | Path, **changes: str | None) -> tuple[int, str]:
    """The exit code and the output of the command `opjit` on a terminal."""
    return python_on_terminal("-m", "opjit", *words, **changes)


def python_on_terminal(*words: str | Path, **changes: str | None) -> tuple[int, str]:
    """The same of Python."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [sys.executable, *words], stdout=theirs, stderr=theirs, env=environment(changes)
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # Linux's end of a terminal that nobody holds
            while part := os.read(ours, 1 << 16):
                shown += part
    os.close(ours)
    return process.returncode, shown.decode()


def module(
    name: str,
    *words: str | Path,
    changes: Mapping[str, str | None] | None = None,
    flags: tuple[str, ...] = (),
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python -m``, however it ends."""
    return _run("-m", name, changes, flags, cwd, words)


def script(
    path: Path,
    *words: str | Path,
    changes: Mapping[str, str | None] | None = None,
    flags: tuple[str, ...] = ("-W", "error"),
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python path``, however it ends, with warnings as errors."""
    return _run("script", str(path), changes, flags, cwd, words)


def example(name: str, *words: str | Path, **how: Any) -> str:
    """What a script of examples/ prints, which must exit with 0."""
    done = script(ROOT / "examples" / name, *words, **how)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def started(code: str, changes: Mapping[str, str | None] | None = None) -> zygote.Process:
    """A process in a session of its own, with pipes, for the test to end."""
    return _forked("-c", textwrap.dedent(code), environment(changes), stdin=subprocess.PIPE)


def started_command(
    *words: str | Path, changes: Mapping[str, str | None] | None = None
) -> zygote.Process:
    """The command `opjit` in a session of its own, for the test to end."""
    return _forked("-m", "opjit", environment(changes), arguments=words)


def _run(
    kind: str,
    code: str,
    changes: Mapping[str, str | None] | None,
    flags: Sequence[str],
    cwd: Path | None,
    arguments: Sequence[str | Path],
) -> subprocess.CompletedProcess[str]:
    """A program in a child of the zygote, or in a new process where a child would not heed a variable."""
    chosen = environment(changes)
    if zygote.unheeded(chosen):
        words = [sys.executable, *flags, *([kind] if kind != "script" else []), code, *arguments]
        return subprocess.run(
            words, env=chosen, capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=cwd
        )
    running = _forked(kind, code, chosen, cwd, flags, arguments)
    try:
        out, err = running.communicate(TIMEOUT)
    except subprocess.TimeoutExpired:
        running.end()
        raise
    return subprocess.CompletedProcess(running.args, running.wait(), out, err)


def _forked(
    kind: str,
    code: str,
    chosen: dict[str, str],
    cwd: Path | None = None,
    flags: Sequence[str] = (),
    arguments: Sequence[str | Path] = (),
    stdin: int | None = None,
) -> zygote.Process:
    request = zygote.Request(
        kind,
        code,
        [str(word) for word in arguments],
        chosen,
        str(cwd or Path.cwd()),
        zygote.umask(),
        [*flags[1::2]],
    )
    return zygote.Process(request, stdin)


def cache_command(*words: str) -> Result:
    """`opjit cache …`, in this process."""
    return CliRunner().invoke(main, ["cache", *words])


def without_pointer(output: str) -> str:
    """A command's output without the last line of an error, which points to the page of errors."""
    return re.sub(r"Run `opjit help \w+` for causes and fixes\.\n\Z", "", output)


def refused(*words: str | Path, code: int = 1) -> str:
    """The one line of an error with which a command ends in this process, and with this exit code."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    message = without_pointer(done.output)
    assert (done.exit_code, message[:7], message.count("\n")) == (code, "Error: ", 1), done.output
    return message


@contextmanager
def process(code: str, changes: Mapping[str, str | None] | None = None) -> Iterator[zygote.Process]:
    """A process in a session of its own, with pipes, which is ended with all its children."""
    running = started(code, changes)
    try:
        yield running
    finally:
        running.end()


def until(
    true: Callable[[], bool],
    seconds: float = 60,
    process: subprocess.Popen[Any] | zygote.Process | None = None,
) -> None:
    """Wait for something that must happen within some seconds, and before the process ends that is to do it."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        assert process is None or process.poll() is None, (
            f"the process ended before it happened: {process.communicate()}"
        )
        time.sleep(0.01)


def state(pid: int) -> str:
    """A process's as the kernel's letter: ``S`` for one that sleeps, ``T`` for a stopped one, and nothing for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def free_port() -> str:
    """A port of 127.0.0.1 that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

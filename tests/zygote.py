"""A process that has imported torch, and not opjit, and forks a child for each snippet of the tests.

A fresh process spends 2 s of CPU time on the import of torch and 0.6 s on taking it down again; a child of the zygote spends neither.
Imported, this module is the client: a Process is used like a subprocess.Popen with pipes of text. Run as a program, it is the zygote
itself: one thread that runs no code of a test, so that whatever a child does, the next one starts as clean.
A request is one message on a socket with five descriptors: a file with the request as JSON, stdin, stdout, stderr, and a pipe that gets
the child's process id and, when it has ended, its exit code."""

import atexit
import builtins
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NoReturn, cast

ENVIRONMENT = dict(os.environ)
# What Python, the C library, torch and numpy read once, when they start: a child would not notice a change.
READ_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_",
    "PYTORCH_",
)
# The names of these for which a child behaves like a fresh process.
HEEDED = (
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
)


@dataclass(frozen=True)
class Request:
    """What a child is to do."""

    kind: str  # of `code`: "-c", a program's text; "-m", a module's name; or "script", a path
    code: str
    arguments: list[str]
    environment: dict[str, str]  # all of it
    cwd: str
    umask: int
    # As after python -W, an action and perhaps a class: ignore::DeprecationWarning.
    warnings: list[str]


def unheeded(environment: Mapping[str, str]) -> set[str]:
    """The variables in which an environment differs from this process's first, and whose change a child would not notice."""
    changed = {name for name, _ in environment.items() ^ ENVIRONMENT.items()}
    return {name for name in changed if name.startswith(READ_AT_START) and name not in HEEDED}


def umask() -> int:
    """This process's."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if line.startswith("Umask:")
    )
    return int(line.split()[1], 8)


class Process:
    """A child of the zygote, in a session of its own, with pipes of text."""

    def __init__(self, request: Request, stdin: int | None = None) -> None:
        """`stdin` is subprocess.PIPE, or None for this process's own."""
        assert not unheeded(request.environment), unheeded(request.environment)
        ends = [os.pipe() for _ in range(4)]
        (given, self_in), (self_out, out), (self_err, err), (self_report, report) = ends
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(asdict(request)).encode())
            file.seek(0)
            socket.send_fds(
                _zygote(),
                [b"request"],
                [file.fileno(), 0 if stdin is None else given, out, err, report],
            )
        for descriptor in (given, out, err, report):
            os.close(descriptor)
        if stdin is None:
            os.close(self_in)
        self.args = request.code
        self.stdin = os.fdopen(self_in, "w", encoding="utf-8") if stdin is not None else None
        self.stdout: IO[str] = os.fdopen(self_out, encoding="utf-8")
        self.stderr: IO[str] = os.fdopen(self_err, encoding="utf-8")
        self.returncode: int | None = None
        self._report = os.fdopen(self_report, encoding="ascii")
        self.pid = int(self._report.readline())

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, cast("float", timeout))
            self.returncode = int(self._report.readline())
            self._report.close()
        return self.returncode

    def send(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of its output, when all who could write to it have ended."""
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                self.stdin.close()
        texts: dict[str, str] = {}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                texts[name] = stream.read()

        readers = [
            threading.Thread(target=read, args=one, daemon=True)
            for one in (("out", self.stdout), ("err", self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, cast("float", timeout))
        self.wait(timeout)
        return texts["out"], texts["err"]

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


_started: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
_starting = threading.Lock()


def _zygote() -> socket.socket:
    """The socket of the zygote, which runs until that is closed."""
    with _starting:
        if not _started:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                # One thread for OpenBLAS: numpy's import would start others, and a fork does not take them along.
                environment = {**ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"}
                process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            _started.append((ours, process))
        return _started[0][0]


def stop() -> None:
    while _started:
        control, process = _started.pop()
        control.close()
        process.wait()


def serve(control: socket.socket) -> Request:
    """Fork a child for each request. This returns in a child; in the zygote itself it ends with the client."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, tuple[int, int]] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                child, report = children.pop(descriptor)
                tell(report, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                os.close(report)
                os.close(descriptor)
                continue
            message, given, _, _ = socket.recv_fds(control, 16, 5)
            if not message:
                os._exit(0)
            report = given.pop()
            child = os.fork()
            if child == 0:
                control.close()
                return become(given)
            tell(report, child)
            for one in given:
                os.close(one)
            waits = os.pidfd_open(child)
            children[waits] = (child, report)
            poll.register(waits, select.POLLIN)


def tell(report: int, number: int) -> None:
    with suppress(OSError):  # the client is gone
        os.write(report, b"%d\n" % number)


def become(given: list[int]) -> Request:
    """Make this child what a fresh process would be at the start of its program."""
    os.setsid()
    # These tests may run in a shell's background, or under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with open(given[0], "rb", closefd=False) as file:
        request = Request(**json.load(file))
    for number, descriptor in enumerate(given[1:]):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.umask(request.umask)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    tempfile.tempdir = None
    started = python_path(ENVIRONMENT)
    installed = [path for path in sys.path[1:] if path not in started]
    first = {
        "-c": "",
        "-m": os.getcwd(),
        "script": os.path.dirname(os.path.realpath(request.code)),
    }[request.kind]
    sys.path[:] = [first, *dict.fromkeys([*python_path(request.environment), *installed])]
    sys.argv[:] = [request.code if request.kind == "script" else request.kind, *request.arguments]
    sys.dont_write_bytecode = bool(request.environment.get("PYTHONDONTWRITEBYTECODE"))
    importlib.invalidate_caches()
    sys.warnoptions[:] = request.warnings
    for action, _, category in (text.partition("::") for text in request.warnings):
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]
    return request


def python_path(environment: Mapping[str, str]) -> list[str]:
    path = environment.get("PYTHONPATH", "")
    return [os.path.abspath(folder) for folder in path.split(os.pathsep)] if path else []


def run(request: Request) -> NoReturn:
    """Run the program, and end as Python does, but without taking its modules down: that costs more than all else."""
    status = 0
    try:
        if request.kind == "-m":
            runpy.run_module(request.code, run_name="__main__", alter_sys=True)
        elif request.kind == "script":
            runpy.run_path(request.code, run_name="__main__")
        else:
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(request.code, "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as ending:
        if ending.code is not None and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        kind, error, trace = sys.exc_info()
        assert kind is not None
        assert error is not None
        assert trace is not None
        sys.excepthook(kind, error.with_traceback(trace.tb_next), None)  # without the line above
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    import torch  # noqa: F401 - what all this is for

    gc.freeze()  # no collection in a child copies the pages of what torch made
    run(serve(socket.socket(fileno=int(sys.argv[1]))))

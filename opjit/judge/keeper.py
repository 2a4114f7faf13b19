"""The process that forks the judge's workers, and the parent of each of them.

judge ──forks────  zygote ──fork── keeper ──fork── worker     runs one candidate, see worker.py
  └──────────────── control ─────────┘               │
  └──────────────── requests ────────────────────────┘

The zygote has imported torch and builders, and never gets the task or a result. A keeper ends its worker, and all that it started, when
the judge closes the control channel or ends.
"""

import os
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from opjit import files, processes
from opjit.builder import torch_builder
from opjit.errors import (
    CompileError,
    DeclarationError,
    DeviceUnavailable,
    OpjitError,
    ToolMissing,
)
from opjit.judge import sandbox, worker
from opjit.judge.bench import Bench
from opjit.judge.protocol import Ask, Channel, Done, Fork
from opjit.judge.verdict import Failure, VerdictReached
from opjit.testing.isolation import Child

_PROCESSES = 256  # and threads that a candidate may have. Compilers need a dozen
_SIGNALS = {
    "freeze": (signal.SIGSTOP, os.CLD_STOPPED),
    "resume": (signal.SIGCONT, os.CLD_CONTINUED),
}

_STOPS = os.WSTOPPED | os.WCONTINUED | os.WNOHANG  # events since the last time


def fork_until_closed(forks: Channel, scratch: Path) -> None:
    """Fork a keeper for each message until the judge is gone, then remove their folder."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Python warns of threads. NumPy's threads end before a fork. CUDA's driver starts one when it is loaded.
    warnings.simplefilter("ignore", DeprecationWarning)
    worker.import_all()
    with suppress(BrokenPipeError):  # the judge has ended
        forks.send(Done())
    with suppress(EOFError):
        while True:
            asked, ends = forks.receive([Fork])
            if asked.programs:
                torch_builder.torch_module()  # for all workers
            if os.fork() == 0:
                forks.end.close()
                control, requests = (Channel(socket.socket(fileno=end)) for end in ends)
                keep(control, requests, scratch / files.random_name(), asked)
            for end in ends:
                os.close(end)
    with suppress(ChildProcessError):
        os.wait()  # for all, because SIGCHLD is ignored
    files.remove_tree(scratch)


def keep(control: Channel, requests: Channel, folder: Path, asked: Fork) -> NoReturn:
    """Run a worker, watch it, and report how it ended."""
    groups = Path("/sys/fs/cgroup")
    version_1 = groups / "pids"
    group = (version_1 if version_1.is_dir() else groups) / f"opjit-judge-{folder.name}"
    try:
        processes.end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        first = _first_of_namespace(asked)

        def run(pipe: Connection) -> None:
            pipe.send(os.getpid())
            control.end.close()
            os.dup2(2, 1)  # the judge's stdout has verdicts, and a worker may not write there
            sandbox.limit(asked.memory)
            sandbox.stay_in_group()
            if first:
                sandbox.few_processes(group, _PROCESSES)
            isolation = ["own processes"] if first else []
            if asked.bench:
                serve(requests, Bench(asked.device))
            else:
                serve(requests, worker.CandidateWorker(folder, asked.device, isolation))

        with Child(run) as process:
            with suppress(EOFError):  # it has ended
                process.messages.recv()  # once it has a group, which can be stopped
            requests.end.close()
            died = _watch(process, control)
            if first:
                os.kill(first, signal.SIGKILL)  # which ends all processes of the namespace
        files.remove_tree(folder)
        control.send(died)
    finally:
        _remove_group(group)
        os._exit(0)


def _remove_group(group: Path) -> None:
    for _ in range(50):
        if not group.is_dir():
            return
        with suppress(OSError):  # its last process is ending
            group.rmdir()
        time.sleep(0.02)


def _first_of_namespace(asked: Fork) -> int:
    """Open a namespace of processes, and fork its first process, which only waits. Returns 0 if the system refuses."""
    possible = asked.programs and sandbox.can_have_own_processes(asked.device)
    if not possible or not sandbox.own_processes():
        return 0

    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        processes.end_with_parent()
        sandbox.own_proc()
        os.close(writing)
        os.close(reading)
        while True:
            signal.pause()
    os.close(writing)
    os.read(reading, 1)  # until it is ready
    os.close(reading)
    return first


def _watch(process: Child, control: Channel) -> VerdictReached:
    """Stop the worker's group of processes and let it go on as the judge asks, until the worker ends, or until the judge lets go.

    No kernel needs to be stopped or continued by anybody else.
    """
    number = awaited = 0  # the keeper's last signal, and the event that it causes
    signals, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # until this process ends
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a child has stopped, continued or ended
    with os.fdopen(os.pidfd_open(process.pid)) as ended:
        while True:
            sources: list[Any] = [ended, control.end, signals]
            ready, _, _ = select.select(sources, [], [])
            if ended in ready:
                return _death(process)
            if signals in ready:
                os.read(signals, 512)
            while event := os.waitid(os.P_PID, process.pid, _STOPS):
                if event.si_code != awaited:
                    return VerdictReached("cheat", "stops or continues its process")
                awaited = 0
                # Only now: a process cannot stop while it waits for a program that is stopped before its start.
                os.killpg(process.pid, number)
                control.send(Done({"pid": process.pid}))
            if control.end in ready:
                try:
                    asked, _ = control.receive([Ask])
                except EOFError:
                    return VerdictReached("crash", "was ended")
                number, awaited = _SIGNALS[asked.method]
                os.kill(process.pid, number)


def _death(process: Child) -> VerdictReached:
    how = process.end()
    if "SIGSYS" in how:
        refused = "makes a system call that computing does not need, for which the kernel ended it"
        return VerdictReached("cheat", refused)
    last_line = process.stderr()[-2000:].strip().splitlines()[-1:]
    return VerdictReached("crash", ": ".join([how, *last_line]))


def serve(requests: Channel, answering: Bench | worker.CandidateWorker) -> None:
    """Let a worker answer the judge's requests, until the judge is gone."""
    own = os.getpid()
    methods = {name: getattr(answering, name) for name in dir(answering) if name[0] != "_"}
    with suppress(EOFError):
        while True:
            asked, descriptors = requests.receive([Ask])
            try:
                answer = methods[asked.method](*descriptors, **asked.arguments)
            except Exception as error:
                answer = _failure(error)
            if os.getpid() != own:
                os._exit(1)  # a copy that the candidate forked

            message, *files = answer if isinstance(answer, tuple) else (answer,)
            requests.send(message, *files)
            for each in files:
                os.close(each)


def _failure(error: Exception) -> VerdictReached:
    if isinstance(error, VerdictReached):
        return error
    word: Failure = "wrong"
    message = str(error)
    if isinstance(error, (CompileError, DeclarationError, SyntaxError)):
        word = "compile"
    elif isinstance(error, (DeviceUnavailable, ToolMissing)):
        word = "unavailable"
    elif "CUDA error" in message:  # the process cannot use the device any more
        word = "crash"
        message = message.splitlines()[0]  # without torch's advice
    if not isinstance(error, OpjitError):
        message = f"{type(error).__name__}: {message}"
    return VerdictReached(word, message[:4000], word in ("compile", "unavailable"))


if __name__ == "__main__":
    fork_until_closed(Channel(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2]))

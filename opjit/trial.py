"""Opening a library for the first time, in a child process: an exception in a static initialiser ends the process that opens it."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
import warnings
from contextlib import suppress

import torch

from opjit.errors import LoadError

PATIENCE = 30.0  # seconds; an initialiser that takes longer is left to the process itself
_SHOWN = 4  # lines of what the child printed


def open_in_child(path: str, name: str) -> None:
    """Refuse a library that would end this process; return where it would not, or where that cannot be told.

    Raises:
        LoadError: with the exception's own words.
    """
    if torch.cuda.is_initialized():
        return  # a child cannot use CUDA then, and an initialiser may want to
    with tempfile.TemporaryFile() as told:
        ended = _child(path, told.fileno())
        told.seek(0)
        lines = [line.strip() for line in told.read(1 << 16).decode(errors="replace").splitlines() if line.strip()]
    if ended >= 0:
        return
    what = next((line.partition("what():")[2].strip() for line in lines if "what():" in line), None)
    reason = f"it threw {what!r}" if what else f"it got {signal.Signals(-ended).name}"
    more = "\n".join(lines[:_SHOWN])
    raise LoadError(f"{name} cannot be loaded, as opening it would end this process: {reason} in a static initialiser (a global object's "
                    "constructor, TORCH_LIBRARY or the like; a TORCH_LIBRARY namespace can be defined once in a process)"
                    + (f"\n{more}" if more else ""))


def _child(path: str, output: int) -> int:
    """How a forked child fares with the library: 0, or the negative number of the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads: the child starts none and ends at once
        child = os.fork()
    if child == 0:
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
                signal.signal(number, signal.SIG_DFL)
            with suppress(OSError):  # what the dynamic loader refuses it also refuses this process, and says why
                ctypes.CDLL(path)
        finally:
            os._exit(0)
    return _wait(child)


def _wait(child: int) -> int:
    limit, pause = time.monotonic() + PATIENCE, 0.001
    while time.monotonic() < limit:
        try:
            ended, status = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            return 0  # somebody else in this process collects all children
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0

"""Open a library in a forked child first, because an exception in a static initializer would end this process."""

import ctypes
import os
import re
import signal
import tempfile
import warnings

import torch

from opjit.errors import LoadError

TIMEOUT = 30  # seconds; if the initializers run longer, the library is not checked
_SHOWN = 500  # characters of the child's output in the error


def check_in_child(path: str, name: str) -> str | None:
    """Open a library in a forked child.

    Returns the dynamic loader's error, which names a missing symbol, or None if the library opens
    or a child cannot check it. Raises LoadError with the exception's text if the child died.
    """
    if torch.cuda.is_initialized():
        return None  # a forked child cannot use CUDA, which an initializer may need
    with tempfile.TemporaryFile() as output:
        ended = _open_in_child(path, output.fileno())
        output.seek(0)
        said = output.read(1 << 16).decode(errors="replace").strip()
    if ended >= 0:
        return said.removeprefix(f"{path}: ") if ended else None
    threw = re.search(r"what\(\): *(.*)", said)
    reason = f"it threw {threw[1].strip()!r}" if threw else f"it got {signal.Signals(-ended).name}"
    raise LoadError(
        f"{name} cannot be loaded, because that would end this process: {reason} in a static initializer (for example, a global "
        f"object's constructor, or TORCH_LIBRARY, which can define a namespace only once in a process)\n{said[:_SHOWN]}".rstrip()
    )


def _open_in_child(path: str, output: int) -> int:
    """Open the library in a forked child, which writes the dynamic loader's error to `output`.

    Returns 0, or 1 if it does not open, or the negative number of the signal that ended the child.
    """
    with warnings.catch_warnings():
        # Python warns of forks with threads, but this child ends at once.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 0
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            for number in (
                signal.SIGABRT,
                signal.SIGSEGV,
                signal.SIGBUS,
                signal.SIGFPE,
                signal.SIGILL,
                signal.SIGALRM,
            ):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(TIMEOUT)
            code = 1
            try:
                ctypes.CDLL(path)
                code = 0
            except OSError as error:
                os.write(output, str(error).encode(errors="replace"))
        finally:
            os._exit(code)
    try:
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        return 0  # another thread waits for all children
    return 0 if ended == -signal.SIGALRM else ended

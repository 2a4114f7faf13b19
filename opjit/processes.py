"""Commands that end with the process that waits for them, and sections that a fork in another
thread must not interrupt.

A forked child lacks the other threads. If one of them held a lock, it would never be free in the
child; a module that it was importing would stay locked; and a command that it was starting would
seem to run for as long as the child does.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from opjit import errors
from opjit.errors import OpjitError

if TYPE_CHECKING:  # late: no hit needs them
    import subprocess
    from concurrent.futures import ThreadPoolExecutor

LATE = "the compiler did not finish within"
_PR_SET_PDEATHSIG = 1
_TIMED_OUT = 124  # the exit code of coreutils' timeout
_LONGEST = 2e6  # seconds that poll(2) can wait
_seconds_to_end = 2.0  # of an interrupted command, so that it can end the processes that it started
_CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; from opjit import processes; processes.answer_call()"
)
_BACKGROUND = (
    "import sys; sys.path[:] = sys.argv[2:]; import pickle; "
    "call = pickle.loads(bytes.fromhex(sys.argv[1])); call[0](*call[1])"
)
_T = TypeVar("_T")
_Value = TypeVar("_Value")
_RLock: type = type(threading.RLock())
_locks: WeakSet[Lock] = WeakSet()
_running: set[subprocess.Popen[Any]] = set()  # the commands of all threads


class CachedProperty(functools.cached_property[_T]):
    """functools.cached_property without the lock that all instances share before Python 3.12.

    A forked child would never get that lock if another thread computes a value at the fork.
    """

    def __init__(self, function: Callable[[Any], _T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


class Lock(_RLock):  # type: ignore[misc]
    """A re-entrant lock, which a forked child finds free unless the forking thread holds it.

    It is Python's RLock, which is acquired and released in C, so that no Ctrl-C comes between.
    Two methods of RLock lack public names, but threading.Condition and logging use them, too. A
    fork in another thread waits for the lock for `fork_timeout` seconds; 0 is not at all, -1
    forever.
    """

    def __init__(self, fork_timeout: float = 0.0) -> None:
        super().__init__()
        self.fork_timeout = fork_timeout
        _locks.add(self)

    def is_held_here(self) -> bool:
        """Return whether this thread holds it."""
        return bool(self._is_owned())


# While one of these is held, forks of other threads wait. A fork acquires them in this order, and
# so does an op.py that builds.
# An op.py runs; not `declaring`, for which a module that the op.py imports, in another thread, may have to wait.
reading = Lock(5.0)
declaring = Lock(-1)  # an op is half declared: a child could neither use it nor declare it
# A build's modules are being imported, for half a second; filelock, half imported, may wait for the fork itself.
importing = Lock(5.0)
starting = Lock(5.0)  # a process is being started
_changing = Lock(5.0)  # SIGCHLD is being changed
_waiters: list[int] = []  # an item for each command that runs though SIGCHLD is ignored
_WATCHED = (reading, declaring, importing, starting)


def _before_fork() -> None:
    for lock in _WATCHED:
        lock.acquire(timeout=lock.fork_timeout)


def _in_parent() -> None:
    for lock in reversed(_WATCHED):
        with suppress(
            RuntimeError
        ):  # the fork gave up waiting, or `watch_forks` was called while it waited
            lock.release()


def _in_child() -> None:
    _in_parent()
    for lock in list(_locks):
        if not lock.is_held_here():
            lock._at_fork_reinit()  # this child lacks the thread that held it


def watch_forks() -> None:
    """Make forks wait.

    Call it again after importing a module that registers hooks: hooks run in the opposite order of
    registration. Otherwise, an import that waits for the module's hook would wait for a fork that
    waits for the import.
    """
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


watch_forks()


def run(
    command: Any, *, check: bool = False, limit: float | None = None, **settings: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command like `subprocess.run`, but end it gently after an interrupt or after `limit`
    seconds.

    The command then counts as failed, and the last line of its output contains the reason.
    """
    with importing:
        import subprocess

    late = False
    with _waiting(), ExitStack() as stack:
        with starting:
            process = stack.enter_context(subprocess.Popen(command, **settings))
        _running.add(process)
        try:
            output, errors = process.communicate(timeout=min(limit, _LONGEST) if limit else None)
        except subprocess.TimeoutExpired:
            late = True
            _end(process)
            output, errors = process.communicate()
        except BaseException:
            _end(process)
            raise
        finally:
            _running.discard(process)
    if late and output is not None:
        said = f"\n{LATE} {limit:g} s, and was ended\n"
        output = output + said if isinstance(output, str) else output + said.encode()
    done = subprocess.CompletedProcess(
        command, _TIMED_OUT if late else process.returncode, output, errors
    )
    if check:
        done.check_returncode()
    return done


def run_printing(command: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command like `run`, without input and in a new session. Its output is text, which includes stderr."""
    with importing:
        import subprocess

    return run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        **settings,
    )


def call_elsewhere(function: Callable[..., _T], *arguments: object) -> _T:
    """Call a function of a module in another process, which ends with this one and prints nothing.

    Gives opjit's warnings, and raises the function's error; OSError or subprocess.SubprocessError
    if the process does not answer.
    """
    with importing:
        import pickle
        import subprocess
        import tempfile

    path = map(os.path.abspath, sys.path)
    command = [sys.executable, "-c", _CHILD, str(os.getpid()), *path]
    with tempfile.TemporaryFile() as file:
        file.write(pickle.dumps((function, arguments)))
        file.seek(0)
        done = run(
            command,
            check=True,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    result, seen = pickle.loads(done.stdout)
    for each in seen:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if isinstance(result, Exception):
        raise result
    return cast("_T", result)


def call_in_background(function: Callable[..., object], *arguments: object) -> None:
    """Call a function of a module in another process of the lowest priority, which outlives this one and prints nothing."""
    with importing:
        import pickle

    given = pickle.dumps((function, arguments)).hex()
    command = [sys.executable, "-c", _BACKGROUND, given, *map(os.path.abspath, sys.path)]
    run_printing(["sh", "-c", 'nice -n 19 "$@" >/dev/null 2>&1 &', "sh", *command])


def answer_call() -> None:
    """Call, in another process, the function that `call_elsewhere` sends, and send the outcome."""
    import pickle

    end_with_commands()
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it has ended already
        return
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function, arguments = pickle.load(sys.stdin.buffer)
        try:
            result = function(*arguments)
        except Exception as error:
            result = error
    ours = [each for each in seen if each.category.__module__ == errors.__name__]
    answer.write(pickle.dumps((result, ours)))
    answer.close()


def end_with_commands() -> None:
    """Let SIGTERM end this process's commands, which have other sessions, and then the process."""
    global _seconds_to_end
    _seconds_to_end = 0.5  # sooner than the parent ends this process

    def end(number: int, frame: object) -> None:
        signal.signal(number, lambda *_: None)
        raise SystemExit(number)

    signal.signal(signal.SIGTERM, end)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextmanager
def handling(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Set a handler or an action of signals during the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage during the block: a build's lists would set off a walk through all of torch's objects, for 78 ms."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def starting_threads() -> Iterator[None]:
    """Raise OpjitError if the system refuses the block a thread."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        raise OpjitError(
            "cannot start a thread for the build; raise `ulimit -v`, `ulimit -u` or the cgroup's "
            "pids.max, or build the op with `opjit precompile` on a machine without these limits"
        ) from None


@contextmanager
def pool(size: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool of threads.

    An interrupt, which Python raises only in the main thread, ends the commands of all threads.
    """
    with importing:
        from concurrent.futures import ThreadPoolExecutor

    with starting_threads(), ThreadPoolExecutor(size) as threads:
        try:
            yield threads
        except (KeyboardInterrupt, SystemExit):
            threads.shutdown(wait=False, cancel_futures=True)
            ending = threading.Thread(target=threads.shutdown)
            since = time.monotonic()
            ending.start()
            while ending.is_alive():
                gentle = (
                    time.monotonic() < since + 2 * _seconds_to_end
                )  # a command may end commands
                for process in list(_running):
                    _signal(process, signal.SIGTERM if gentle else signal.SIGKILL)
                ending.join(0.1)
            raise


def in_parallel(
    function: Callable[[_Value], _T], values: Sequence[_Value], width: int = 32
) -> list[_T]:
    """Return a function's results for values, from a pool of threads.

    After an error, no other call starts. A thread or a hook that still runs while Python exits
    gets them one after another, because a pool accepts no work then.
    """
    if len(values) < 2 or not threading.main_thread().is_alive():
        return [function(value) for value in values]
    failed = threading.Event()

    def call(value: _Value) -> _T:
        if failed.is_set():
            raise RuntimeError("not called, because an earlier call failed")
        try:
            return function(value)
        except BaseException:
            failed.set()
            raise

    with pool(width) as threads:
        return list(threads.map(call, values))


def _end(process: subprocess.Popen[Any]) -> None:
    """Terminate a command, and kill it if that fails.

    If it has a separate session, all processes that it started end with it.
    """
    import subprocess

    _signal(process, signal.SIGTERM)
    try:
        process.wait(_seconds_to_end)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


@contextmanager
def _waiting() -> Iterator[None]:
    """Let this process wait for children during the block.

    If SIGCHLD is ignored, for example in many servers, the system forgets the exit codes of
    children, and the children ignore the signal like their parent, so that a
    compiler's driver cannot wait for its parts. The signal is changed by C, because Python changes signals only in the main thread.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    import ctypes

    change = ctypes.CDLL(None).signal
    change.argtypes = [ctypes.c_int, ctypes.c_void_p]
    with _changing:
        _waiters.append(1)
        change(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        with _changing:
            _waiters.pop()
            if not _waiters:
                change(signal.SIGCHLD, signal.SIG_IGN)

"""Restrict a worker before it runs untrusted code: system calls, files, memory, processes.

Each function that can fail for lack of support returns whether the restriction is in force.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import NamedTuple

from opjit.judge import system_calls

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_ALL_THREADS = 1  # SECCOMP_FILTER_FLAG_TSYNC
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_FAIL = 0x00050000  # plus an error number. Number 0 skips the call, which seems to succeed

# Instructions of BPF.
_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_ANY_BIT = 0x45
_RETURN = 0x06

_ARGUMENTS = 16  # the offset of a call's arguments
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_PROT_EXEC = 4
_DATAGRAM = 2  # a bit of SOCK_DGRAM and SOCK_RAW: a datagram can go to any address
_NAMESPACES = 0x7E020000  # CLONE_NEW*
# Commands of fcntl(2), without F_SETOWN and the like, which send signals to other processes.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1024, 1030, 1031, 1032, 1033, 1034)

_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_SPECIAL_FILES = 1 << 6 | 1 << 9 | 1 << 11  # making devices and sockets
_IOCTL_DEVICE = 1 << 15
_CHANGES = 0b1111111111110010  # all rights but executing and reading
_SCOPES = 0b11  # abstract sockets and signals
_TCP = 0b11
_FILES = 1 << 30  # bytes
_DEVICES = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/nvidia*"

_Instruction = tuple[int, int, int, int]
_LOAD_NUMBER: _Instruction = (_LOAD, 0, 0, 0)


class Test(NamedTuple):
    """A test of half of a system call's argument: it equals a value, or lacks all bits of it."""

    offset: int
    instruction: int
    value: int


def equals(argument: int, value: int) -> Test:
    return Test(_ARGUMENTS + 8 * argument, _IF_EQUAL, value)


def lacks(argument: int, bits: int) -> Test:
    return Test(_ARGUMENTS + 8 * argument, _IF_ANY_BIT, bits)


def allow_if(number: int, *tests: Test) -> list[_Instruction]:
    """Return BPF that allows a system call if its arguments pass tests, and goes on if not."""
    code: list[_Instruction] = [(_RETURN, 0, 0, _ALLOW), _LOAD_NUMBER]  # for the next rule
    for test in reversed(tests):
        skipped = len(code) - 1
        jumps = (0, skipped) if test.instruction == _IF_EQUAL else (skipped, 0)
        code = [(_LOAD, 0, 0, test.offset), (test.instruction, *jumps, test.value), *code]
    return [(_IF_EQUAL, 0, len(code), number), *code]


def allow_loading() -> bool:
    """Kill this process for a call that neither computing nor opening a library needs."""
    conditions: dict[str, Sequence[Test]] = {
        "mmap": (),
        "mprotect": (),
        "tgkill": [equals(0, os.getpid())],
        "rt_sigaction": (),
        "prctl": [equals(0, _PR_SET_NO_NEW_PRIVS)],  # for `allow_computing`
    }
    actions = {system_calls.COMPUTING: _ALLOW, system_calls.LOADING: _ALLOW}
    return _install(actions, _KILL, conditions)


def allow_computing() -> bool:
    """Kill this process for a call that computing does not need. Opening a file only fails.

    No memory becomes executable. A signal can be sent to this process only, for abort().
    """
    conditions: dict[str, Sequence[Test]] = {
        "mmap": [lacks(2, _PROT_EXEC)],
        "mprotect": [lacks(2, _PROT_EXEC)],
        "tgkill": [equals(0, os.getpid())],
        "rt_sigaction": [equals(0, signal.SIGINT)],  # opjit_interrupted()
    }
    actions = {system_calls.COMPUTING: _ALLOW, system_calls.LOADING: _FAIL | errno.EACCES}
    return _install(actions, _KILL, conditions)


def allow_programs() -> bool:
    """Let this process start programs and use devices, but send nothing to other processes.

    Calls that change a file's mode, owner or attributes do nothing. Its time can become the present.
    """
    low = equals(2, 0)  # half of a pointer
    # The processes that it may signal are Landlock's matter.
    conditions: dict[str, Sequence[Test]] = {
        **dict.fromkeys(("mmap", "mprotect", "tgkill", "rt_sigaction", "prctl"), ()),
        "clone": [lacks(0, _NAMESPACES)],
        "socketpair": [lacks(1, _DATAGRAM)],
        "prlimit64": [equals(0, 0)],  # of this process
        "utimensat": [low, low._replace(offset=low.offset + 4)],
    }
    allowed = (system_calls.COMPUTING, system_calls.LOADING, system_calls.PROGRAMS)
    actions = {system_calls.IGNORED: _FAIL, **dict.fromkeys(allowed, _ALLOW)}
    return _install(actions, _FAIL | errno.ENOSYS, conditions)


def stay_in_group() -> bool:
    """Keep what this process starts in its group of processes: calls that leave it do nothing."""
    return _install({system_calls.LEAVING: _FAIL}, _ALLOW, {})


def _install(
    actions: dict[str, int], otherwise: int, conditions: dict[str, Sequence[Test]]
) -> bool:
    """Install a filter in all threads of this process.

    A call is allowed if it passes the tests of `conditions`. Otherwise, the table that lists it decides.
    """
    machine = platform.machine()
    if machine not in _AUDIT:
        return False

    code = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        _LOAD_NUMBER,
    ]
    numbers = system_calls.numbers(system_calls.CONDITIONAL)
    for command in _FCNTL:
        code += allow_if(numbers["fcntl"], equals(1, command))
    for name, tests in conditions.items():
        code += allow_if(numbers[name], *tests)
    for table, action in actions.items():
        for number in system_calls.numbers(table).values():
            code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, action)]
    code.append((_RETURN, 0, 0, otherwise))
    packed = b"".join(struct.pack("<HBBI", *each) for each in code)
    program = ctypes.create_string_buffer(packed)
    header = struct.pack("<H6xQ", len(code), ctypes.addressof(program))

    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    number = _SECCOMP[machine]
    return bool(libc.syscall(number, _SECCOMP_SET_MODE_FILTER, _ALL_THREADS, header) == 0)


def restrict_files(readable: Iterable[str], writable: Iterable[str] = ()) -> bool:
    """Let this process read and write files only in some folders, and on devices that are known.

    It can also open no TCP connection, and neither trace nor signal a process outside.
    """
    libc = ctypes.CDLL(None)
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False

    number_of_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    known = (1 << number_of_rights) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    handled = struct.pack("<QQQ", (_CHANGES | _READ_FILE) & known, _TCP, _SCOPES)[:size]
    ruleset = libc.syscall(_LANDLOCK_CREATE, handled, size, 0)
    if ruleset < 0:
        return False

    rights = dict.fromkeys(readable, _READ_FILE)
    for path in writable:
        rights[path] = _READ_FILE | _CHANGES & ~_SPECIAL_FILES
    for pattern in _DEVICES.split():
        for path in glob(pattern):
            rights[path] = _READ_FILE | _WRITE_FILE | _IOCTL_DEVICE

    try:
        for path, allowed in rights.items():
            with suppress(OSError):  # it does not exist
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rule = struct.pack("<Qi", allowed & known, descriptor)
                libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0)
                os.close(descriptor)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return bool(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def all_but_devices() -> list[str]:
    """Return the folders of the root, without /dev: devices can be opened by name only."""
    return [str(path) for path in Path("/").iterdir() if path.name != "dev"]


def can_have_own_processes(device: str) -> bool:
    """Try `own_processes` in a child. CUDA reads /proc, which has to show the namespace."""
    tried = os.fork()
    if tried == 0:
        if not own_processes():
            os._exit(1)
        first = os.fork()
        if first == 0:
            os._exit(not own_proc() and device != "cpu")
        os._exit(os.waitpid(first, 0)[1])
    return os.waitpid(tried, 0)[1] == 0


def own_processes() -> bool:
    """Put the future children of this process into a namespace: when the first dies, all die."""
    new_user = 0x10000000
    new_processes = 0x20000000
    new_mounts = 0x20000
    user = os.geteuid()
    group = os.getegid()

    libc = ctypes.CDLL(None)
    if libc.unshare(new_processes | new_mounts) == 0:
        return True
    if libc.unshare(new_user | new_processes | new_mounts) != 0:
        return False
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    with suppress(OSError):
        for name, text in maps.items():
            Path("/proc/self", name).write_text(text, "ascii")
    return True


def own_proc() -> bool:
    """In the first process of a namespace, make /proc show the namespace's processes.

    Some containers do not allow it.
    """
    private = ctypes.c_ulong(0x44000)  # recursive
    safe = ctypes.c_ulong(0xE)  # without programs and devices
    libc = ctypes.CDLL(None)
    if libc.mount(None, b"/", None, private, None) != 0:
        return False
    return bool(libc.mount(b"proc", b"/proc", b"proc", safe, None) == 0)


def few_processes(group: Path, limit: int) -> None:
    """Limit the processes and threads that this process starts, by a control group if possible."""
    _set_limit(resource.RLIMIT_NPROC, limit)  # counts the processes of the namespace's user
    with suppress(OSError):
        group.mkdir()
        (group / "pids.max").write_text(str(limit), "ascii")
        (group / "cgroup.procs").write_text("0", "ascii")


def limit(memory: int) -> None:
    """Limit this process's memory and files, and make the system kill it first when memory is short."""
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_DATA, memory)
    _set_limit(resource.RLIMIT_FSIZE, _FILES)  # of each file, also in memory
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


def _set_limit(kind: int, value: int) -> None:
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))

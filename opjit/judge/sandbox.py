"""What the kernel takes from a child before it runs a stranger's code: system calls, files, memory. Each function says whether it held."""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000 | 38  # ENOSYS
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of BPF
_MACHINE = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}.get(
    platform.machine()
)  # column, audit arch, seccomp
_PROT_EXEC = 4
# What a kernel's process needs once the kernel is loaded: numbers on x86-64 and on arm64.
_NEEDED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "munmap": (11, 215),
    "brk": (12, 214),
    "sigprocmask": (14, 135),
    "sigreturn": (15, 139),
    "pread": (17, 67),
    "pwrite": (18, 68),
    "writev": (20, 66),
    "yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "exit": (60, 93),
    "fcntl": (72, 25),
    "ftruncate": (77, 46),
    "gettimeofday": (96, 169),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "affinity": (204, 123),
    "restart": (219, 128),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "robust": (273, 99),
    "getrandom": (318, 278),
    "memfd_create": (319, 279),
    "membarrier": (324, 283),
    "rseq": (334, 293),
    "poll": (7, 73),
    "getrusage": (98, 165),
    "newfstatat": (262, 79),
    "clock_nanosleep": (230, 115),
}
_MMAP, _MPROTECT = (9, 222), (10, 226)  # allowed where nothing becomes executable
_TGKILL, _SIGACTION = (
    (234, 131),
    (13, 134),
)  # allowed for this process: abort(); and for SIGINT: opjit_interrupted()

_WRITES = (
    0b1111111111110 & ~0b1100 | 1 << 13 | 1 << 14
)  # Landlock: all but executing and reading of files and folders
_LANDLOCK = (444, 445, 446)


def no_system_calls() -> bool:
    """Have this process, with all of its threads, die of a system call that computing does not need: no files, processes, threads,
    signals, sockets, nor executable memory. Only x86-64 and arm64."""
    if _MACHINE is None:
        return False
    column, arch, seccomp = _MACHINE
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    executable, to_this, of_interrupt = (
        (_ANY_BIT, 0, 1, _PROT_EXEC),
        (_EQUAL, 1, 0, os.getpid()),
        (_EQUAL, 1, 0, signal.SIGINT),
    )
    for numbers, at, test in (
        (_MMAP, 32, executable),
        (_MPROTECT, 32, executable),
        (_TGKILL, 16, to_this),
        (_SIGACTION, 16, of_interrupt),
    ):
        code += [
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, at),
            test,
            (_RETURN, 0, 0, _KILL),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for numbers in _NEEDED.values():
        code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _KILL))
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in code))
    header = ctypes.create_string_buffer(struct.pack("<H6xQ", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None)
    return not (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        or libc.syscall(seccomp, _SECCOMP_SET_MODE_FILTER, _FLAG_TSYNC, header)
    )


def no_writing(writable: Sequence[str] = ()) -> bool:
    """Have this process change no file but below some folders, open no connection, and neither trace nor signal a process outside."""
    libc = ctypes.CDLL(None)
    abi = libc.syscall(_LANDLOCK[0], None, 0, 1)
    if abi < 1:
        return False
    known = (1 << (13 if abi < 2 else 14 if abi < 3 else 15)) - 1
    attributes = struct.pack(
        "<QQQ", _WRITES & known, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0
    )
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(_LANDLOCK[0], attributes, size, 0)
    if ruleset < 0:
        return False
    try:
        for path, allowed in (*((each, _WRITES) for each in writable), ("/dev", 1 << 1)):
            with suppress(OSError):
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
                libc.syscall(
                    _LANDLOCK[1], ruleset, 1, struct.pack("<Qi", allowed & known, folder), 0
                )
                os.close(folder)
        return not (
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_LANDLOCK[2], ruleset, 0)
        )
    finally:
        os.close(ruleset)


def can_have_own_processes(device: str) -> bool:
    """Try `own_processes` in a child. CUDA reads /proc, which has to show the namespace."""
    if (tried := os.fork()) == 0:
        held = own_processes()
        if held and (first := os.fork()) == 0:
            os._exit(not own_proc() and device != "cpu")
        os._exit(not held or os.waitpid(first, 0)[1])
    return os.waitpid(tried, 0)[1] == 0


def own_processes() -> bool:
    """Give the children that this process forks from now on a namespace of process ids: when the first one dies, all die."""
    new_user, new_ids, new_mounts = 0x10000000, 0x20000000, 0x20000
    libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
    if libc.unshare(new_ids | new_mounts) == 0:
        return True
    if libc.unshare(new_user | new_ids | new_mounts) != 0:
        return False
    with suppress(OSError):
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    return True


def own_proc() -> bool:
    """In the first process of a namespace: have /proc show its processes, to all of them. Not every container lets it."""
    private, unsafe = (
        ctypes.c_ulong(0x44000),
        ctypes.c_ulong(0xE),
    )  # recursive, and neither programs nor devices
    libc = ctypes.CDLL(None)
    return not (
        libc.mount(None, b"/", None, private, None)
        or libc.mount(b"proc", b"/proc", b"proc", unsafe, None)
    )


def few_processes(group: Path, most: int) -> None:
    """Have the system refuse this process more than so many processes and threads: by a control group for root, else by a limit."""
    with suppress(OSError, ValueError):
        resource.setrlimit(
            resource.RLIMIT_NPROC, (most, most)
        )  # counts those of the namespace's user
    with suppress(OSError):
        group.mkdir()
        (group / "pids.max").write_text(str(most), "ascii")
        (group / "cgroup.procs").write_text("0", "ascii")


def limit(memory: int) -> None:
    """Limit this process's own memory, its files and its dumps, and have the system end it first where memory is short."""
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 1 << 30),
        (resource.RLIMIT_DATA, memory),
    ):
        with suppress(OSError, ValueError):
            resource.setrlimit(what, (most, most))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")

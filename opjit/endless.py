"""Pipes and devices that a compiler opens as files, for example because a source includes one.

Such a file may have no end, so a compiler would wait for it, or fill the memory. Only the compiler
knows which files it opens, and Linux shows in /proc which file a process waits for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# System calls by number on x86-64 and on ARM64, and the position of the path or the descriptor.
_OPENS = {"x86_64": {"2": 1, "257": 2}, "aarch64": {"56": 2}}
_READS = {"x86_64": "0", "aarch64": "63"}
_MEMORY_DEVICES = 1  # the major number of /dev/zero, /dev/full, /dev/urandom and others
_MAX_PATH = 4096


def find(process: int) -> str | None:
    """Return the pipe or device that a process or one of its descendants waits for or reads; None
    without one, or if the system does not show it.
    """
    children = _children(process)
    if children:
        return next(filter(None, map(find, children)), None)
    with suppress(OSError, ValueError, IndexError):  # the process has ended, or is hidden
        return _awaited(process) or next(_opened_memory(process), None)
    return None


def _children(process: int) -> list[int]:
    found = list[int]()
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _awaited(process: int) -> str | None:
    """Return the pipe or device that a process waits to open or to read."""
    machine = os.uname().machine
    call = Path(f"/proc/{process}/syscall").read_text().split()
    if call[0] == _READS.get(machine):
        path = os.readlink(f"/proc/{process}/fd/{int(call[1], 16)}")
        return path if _is_endless(path) else None
    argument = _OPENS.get(machine, {}).get(call[0])
    if argument is None:
        return None
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        start = int(call[argument], 16)
        memory.seek(start)
        # A read ends before a page that does not exist.
        text = memory.read(_MAX_PATH).partition(b"\0")[0]
    path = os.path.join(os.readlink(f"/proc/{process}/cwd"), os.fsdecode(text))
    return os.path.normpath(path) if _is_endless(path) else None


def _opened_memory(process: int) -> Iterator[str]:
    """Yield the devices without an end that a process has opened."""
    for place in Path(f"/proc/{process}/fd").iterdir():
        status = place.stat()
        is_device = stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == _MEMORY_DEVICES
        if is_device and not os.path.samestat(status, os.stat(os.devnull)):
            yield os.readlink(place)


def _is_endless(path: str) -> bool:
    """Return whether a path names a pipe or a device. Raises OSError for a pipe between programs,
    which has no path.
    """
    mode = os.stat(path).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)

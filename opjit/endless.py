"""Pipes and devices that a compiler opens as files, for example because a source includes one.

Such a file may have no end, so a compiler would wait for it, or fill the memory. Only the compiler
knows which files it opens, and Linux shows in /proc which file a process waits for.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

# The numbers of system calls on x86-64 and on ARM64. A path is at the second position.
_OPENAT = ("257", "56")
_READ = ("0", "63")
_ZERO = {"/dev/full", "/dev/random", "/dev/urandom", "/dev/zero"}  # a read never waits or ends


def find(process: int | str) -> str | None:
    """Return the pipe or device that a process or one of its descendants waits for or reads; None
    without one, or if the system does not show it.
    """
    place = Path(f"/proc/{process}")
    with suppress(OSError, ValueError, IndexError):  # the process has ended, or is hidden
        children = " ".join(each.read_text() for each in place.glob("task/*/children")).split()
        if children:
            return next(filter(None, map(find, children)), None)
        opened = {os.readlink(each) for each in place.glob("fd/*")}
        return next(iter(opened & _ZERO), None) or _awaited(place)
    return None


def _awaited(place: Path) -> str | None:
    """Return the pipe or device that a process, by its folder in /proc, waits to open or to read.

    Raises OSError for a pipe between programs, which has no path.
    """
    number, first, second, *_ = (place / "syscall").read_text().split()
    if number in _READ:
        path = os.readlink(place / f"fd/{int(first, 16)}")
    elif number in _OPENAT:
        with open(place / "mem", "rb", buffering=0) as memory:
            memory.seek(int(second, 16))
            # A path, up to the end of the mapped memory.
            text = memory.read(4096).partition(b"\0")[0]
        path = os.path.normpath(os.path.join(os.readlink(place / "cwd"), os.fsdecode(text)))
    else:
        return None
    mode = os.stat(path).st_mode
    return path if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) else None

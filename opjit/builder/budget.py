"""The number of parallel builds that this process's CPUs and memory allow, also in a container.

A job builds one op for one target and keeps one CPU busy. More jobs than CPUs are not faster, and the kernel kills compilers that run out
of memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from opjit.errors import OpjitError

GIB = 1 << 30
# A job's memory in bytes, rounded up. Measured in its largest process (nvcc 13.0, gcc 12): 0.04 GiB for a bundled C op, 0.18 GiB for a
# bundled CUDA op, 0.67 GiB for a .cu with two instances of thrust::sort.
C_JOB = GIB // 4
NVCC_JOB = GIB
_UNLIMITED = 1 << 60  # bytes


def jobs(need: int, asked: int | None = None, root: Path = Path("/")) -> int:
    """Return the number of jobs to run at once: as asked, else OPJIT_JOBS, else as many as fit that need so many bytes each. Raises
    OpjitError if a given number is not positive."""
    setting = os.environ.get("OPJIT_JOBS", "") if asked is None else str(asked)
    if setting:
        if not setting.strip().isdecimal() or int(setting) < 1:
            name = "OPJIT_JOBS" if asked is None else "the number of jobs"
            raise OpjitError(f"expected a number of parallel builds, 1 or more; {name} is {setting!r}")
        return int(setting)
    return max(1, min(cpus(root), memory(root) // need))


def cpus(root: Path = Path("/")) -> int:
    """Count the CPUs of this process: its affinity, limited by its control groups' quota, rounded up."""
    found = len(os.sched_getaffinity(0))
    for group in _groups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # else unlimited: "max"
            found = min(found, math.ceil(int(quota) / int(period)))
    return max(1, found)


def memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process and its children may still allocate, on the machine and in each control group."""
    found = _number(r"MemAvailable: *(\d+)", _read(root / "proc/meminfo"), _UNLIMITED >> 10) << 10
    for group in _groups(root):
        limit, used = (_number(r"(\d+)", _read(group / name), _UNLIMITED) for name in ("memory.max", "memory.current"))
        if limit < _UNLIMITED:
            # Cached files count as used, and the kernel drops them on demand.
            cached = _number(r"inactive_file (\d+)", _read(group / "memory.stat"), 0)
            found = min(found, max(0, limit - used + cached))
    return found


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group (version 2) and of its parents. Each may set a limit."""
    own = re.search(r"^0::(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    names = [name for name in own[1].split("/") if name not in ("", "..")] if own else []
    for length in range(len(names), -1, -1):  # a container, which has its own group at the top, may name folders that it does not see
        yield root.joinpath("sys/fs/cgroup", *names[:length])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(pattern: str, text: str, default: int) -> int:
    """Return the number in the line that a pattern begins to match."""
    found = re.search(f"^{pattern}", text, re.MULTILINE)
    return int(found[1]) if found else default

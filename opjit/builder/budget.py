"""The number of parallel builds that this process's CPUs and memory allow, also in a container.

A job builds one op for one target and keeps one CPU busy. More jobs than CPUs are not faster, and the kernel kills compilers that run out
of memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from opjit.errors import OpjitError

GIB = 1 << 30
# A job's memory in bytes, rounded up. Measured in its largest process (nvcc 13.0, gcc 12): 0.04 GiB for a bundled C op, 0.18 GiB for a
# bundled CUDA op, 0.67 GiB for a .cu with two instances of thrust::sort.
C_JOB = GIB // 4
NVCC_JOB = GIB
_UNLIMITED = 1 << 60  # bytes; cgroup v1 writes a number about this large for "no limit"


def jobs(need: int, asked: int | None = None, root: Path = Path("/")) -> int:
    """Return the number of jobs to run at once, at least 1. Raises OpjitError if OPJIT_JOBS or `asked` is not a positive integer.

    Args:
        need: memory of one job in bytes.
        asked: the user's choice; None means OPJIT_JOBS, else as many as fit.
        root: the root of the filesystem with /proc and the control groups.
    """
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
    for folder in _groups(root, "cpu"):
        quota = _read(folder / "cpu.max").split() or [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(quota) == 2 and all(part.isdecimal() for part in quota) and int(quota[1]) > 0:  # else unlimited: "max" or -1
            found = min(found, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, found)


def memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process and its children may still allocate, on the machine and in each control group."""
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    found = available * 1024 if available is not None else _UNLIMITED
    for folder in _groups(root, "memory"):
        for limit, used, cached in (("memory.max", "memory.current", "inactive_file"),
                                    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
            numbers = [_read(folder / name) for name in (limit, used)]
            if all(number.isdecimal() for number in numbers) and int(numbers[0]) < _UNLIMITED:
                # Cached files count as used, and the kernel drops them on demand.
                free = int(numbers[0]) - int(numbers[1]) + _fields(folder / "memory.stat").get(cached, 0)
                found = min(found, max(0, free))
    return found


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents, for a controller. Each may set a limit."""
    own = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        own.update(dict.fromkeys(names.split(","), path))  # cgroup v2 has no controller names
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        name = "" if kind[0] == "cgroup2" else controller
        if name not in own or (name and name not in kind[2].split(",")):
            continue
        mount = root / fields[4].lstrip("/")
        path = os.path.relpath(own[name] or "/", fields[3])  # a container sees only the tree below its own group
        place = mount if path.startswith("..") else Path(os.path.normpath(mount / path))
        yield place
        while place != mount:
            place = place.parent
            yield place


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    """Parse lines such as ``MemAvailable: 1024 kB`` or ``inactive_file 4096``."""
    parts = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {part[0]: int(part[1]) for part in parts if len(part) >= 2 and part[1].isdecimal()}

"""How many builds at once: what the CPUs and the memory that this process may use allow, in a container too.

A job is one op for one target: mostly one process that works, so a job for each CPU keeps them all busy. More would not be faster, and
compilers that run out of memory are killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from opjit.errors import OpjitError

GIB = 1 << 30
# Memory of a job, in bytes, with room. Seen in the largest process of a job (nvcc 13.0, gcc 12): 0.04 GiB for a bundled C op, 0.18 for
# a bundled CUDA op, 0.67 for a .cu with two instances of thrust::sort; the process that waits for them adds less than 0.1 of its own.
C_JOB = GIB // 4
NVCC_JOB = GIB
_UNLIMITED = 1 << 60  # version 1 writes «no limit» as a number about this large


def jobs(need: int, asked: int | None = None, root: Path = Path("/")) -> int:
    """How many jobs to run at once; at least 1.

    Args:
        need: bytes of memory that one job takes.
        asked: what the user asked for; None is OPJIT_JOBS, else what fits.
        root: of the filesystem that holds /proc, and there the paths of the control groups.

    Raises:
        OpjitError: OPJIT_JOBS or `asked` is no number of jobs.
    """
    told = os.environ.get("OPJIT_JOBS", "") if asked is None else str(asked)
    if told:
        if not told.strip().isdecimal() or int(told) < 1:
            name = "OPJIT_JOBS" if asked is None else "the number of jobs"
            raise OpjitError(f"expected how many builds to run at once, 1 or more, and {name} is {told!r}")
        return int(told)
    return max(1, min(cpus(root), memory(root) // need))


def cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use: its affinity, and the quota of its control groups, rounded up."""
    found = len(os.sched_getaffinity(0))
    for folder in _groups(root, "cpu"):
        quota = _read(folder / "cpu.max").split() or [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(quota) == 2 and all(part.isdecimal() for part in quota) and int(quota[1]) > 0:  # not «max», and not -1
            found = min(found, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, found)


def memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its children may still take: of the machine's, and of each of its control groups'."""
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    found = available * 1024 if available is not None else _UNLIMITED
    for folder in _groups(root, "memory"):
        for limit, used, cached in (("memory.max", "memory.current", "inactive_file"),
                                    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
            numbers = [_read(folder / name) for name in (limit, used)]
            if all(number.isdecimal() for number in numbers) and int(numbers[0]) < _UNLIMITED:
                # Files that were read count as used, and make room when room is needed.
                free = int(numbers[0]) - int(numbers[1]) + _fields(folder / "memory.stat").get(cached, 0)
                found = min(found, max(0, free))
    return found


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group for a controller, and of those that it is in: each may have a limit."""
    own = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        own.update(dict.fromkeys(names.split(","), path))  # version 2 has no names
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        name = "" if kind[0] == "cgroup2" else controller
        if name not in own or (name and name not in kind[2].split(",")):
            continue
        mount = root / fields[4].lstrip("/")
        path = os.path.relpath(own[name] or "/", fields[3])  # a container sees the part of the tree below its own group
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
    """Lines such as ``MemAvailable: 1024 kB`` or ``inactive_file 4096``, as numbers."""
    parts = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {part[0]: int(part[1]) for part in parts if len(part) >= 2 and part[1].isdecimal()}

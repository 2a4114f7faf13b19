"""How many compilers a build runs at once: the CPUs and the memory of this process, inside or outside a container."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from opjit.errors import OpjitError

GIB = 1 << 30
# A compiler's memory in bytes, rounded up. Measured in its largest process (nvcc 13.0, gcc 12): 0.04 GiB for a bundled C op, 0.18 GiB for a
# bundled CUDA op, 0.67 GiB for a .cu with two instances of thrust::sort, 1.5 GiB and with nvcc 2.9 GiB for torch/extension.h.
C_JOB = GIB // 4
CXX_JOB = GIB // 2
NVCC_JOB = GIB
TORCH_CXX_JOB = 7 * GIB // 4
_UNLIMITED = 1 << 60  # bytes


def jobs(need: int, asked: int | None = None, root: Path = Path("/")) -> int:
    """Return the number of jobs to run at the same time: the requested number or, without one,
    OPJIT_JOBS or, if it is not set, the number of jobs of this size that fit.

    Raises OpjitError if a given number is not positive.
    """
    setting = os.environ.get("OPJIT_JOBS", "") if asked is None else str(asked)
    if setting and (not setting.strip().isdecimal() or int(setting) < 1):
        name = "OPJIT_JOBS" if asked is None else "the number of jobs"
        raise OpjitError(f"expected a number of parallel builds, 1 or more; {name} is {setting!r}")
    return int(setting or max(1, min(cpus(root), memory(root) // need)))


def width(need: int) -> int:
    """Return the number of compilers that one build runs at once: `jobs`, and at most MAX_JOBS,
    like for torch's builder.
    """
    limit = os.environ.get("MAX_JOBS", "").strip()
    found = jobs(need)
    return min(found, int(limit)) if limit.isdecimal() and int(limit) else found


def cpus(root: Path = Path("/")) -> int:
    """Count the CPUs of this process: its affinity, limited by its control groups' quota, rounded up."""
    found = len(os.sched_getaffinity(0))
    for group in _groups(root):
        quota, _, period = _read_text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # else unlimited: "max"
            found = min(found, math.ceil(int(quota) / int(period)))
    return max(1, found)


def memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process and its children may still allocate, on the machine and in each control group."""
    found = (
        _number(r"MemAvailable: *(\d+)", _read_text(root / "proc/meminfo"), _UNLIMITED >> 10) << 10
    )
    for group in _groups(root):
        most = _read_text(group / "memory.max") or _read_text(group / "memory.limit_in_bytes")
        if (limit := _number(r"(\d+)", most, _UNLIMITED)) < _UNLIMITED:
            used = _number(
                r"(\d+)",
                _read_text(group / "memory.current") or _read_text(group / "memory.usage_in_bytes"),
                _UNLIMITED,
            )
            # Cached files count as used, and the kernel drops them on demand.
            cached = _number(
                r"(?:total_)?inactive_file (\d+)", _read_text(group / "memory.stat"), 0
            )
            found = min(found, max(0, limit - used + cached))
    return found


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents, of version 2, and of version 1 for memory. Each may set a
    limit."""
    for pattern, place in (
        (r"^0::(.*)$", "sys/fs/cgroup"),
        (r"^\d+:(?:.*,)?memory(?:,.*)?:(.*)$", "sys/fs/cgroup/memory"),
    ):
        own = re.search(pattern, _read_text(root / "proc/self/cgroup"), re.MULTILINE)
        names = [name for name in own[1].split("/") if name not in ("", "..")] if own else []
        for length in range(
            len(names), -1, -1
        ):  # a container has a separate group at the top, and may name folders that it does not see
            yield root.joinpath(place, *names[:length])


def _read_text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(pattern: str, text: str, default: int) -> int:
    """Return the number in the line that a pattern begins to match."""
    found = re.search(f"^{pattern}", text, re.MULTILINE)
    return int(found[1]) if found else default

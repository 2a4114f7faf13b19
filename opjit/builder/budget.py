"""The CPUs and memory that all compilers of a user share on a machine, in any process, inside or
outside a container.

A compiler's share is a file, locked with flock(2), which the kernel unlocks when its holder dies:

    <tmp>/opjit-<uid>/shares-<limits of the process>/<bytes>.<bytes of all>.<process>.<random>

More compilers than CPUs are not faster, and the kernel kills compilers that
run out of memory.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opjit import files, processes
from opjit.errors import OpjitError

GIB = 1 << 30
# A compiler's memory in bytes, rounded up. Measured in its largest process (nvcc 13.0, gcc 12): 0.04 GiB for a bundled C op, 0.18 GiB for a
# bundled CUDA op, 0.67 GiB for a .cu with two instances of thrust::sort, 1.5 GiB and with nvcc 2.9 GiB for torch/extension.h.
C_JOB = GIB // 4
CXX_JOB = GIB // 2
NVCC_JOB = GIB
TORCH_CXX_JOB = 7 * GIB // 4
TORCH_NVCC_JOB = 13 * GIB // 4
_UNLIMITED = 1 << 60  # bytes
_POLL = 0.05  # seconds
_NEW = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def jobs(need: int, asked: int | None = None, root: Path = Path("/")) -> int:
    """Return the number of jobs to run at the same time: the requested number or, without one,
    OPJIT_JOBS or, if it is not set, the number of jobs of this size that fit.

    Raises OpjitError if a given number is not positive.
    """
    setting = os.environ.get("OPJIT_JOBS", "") if asked is None else str(asked)
    if setting and (not setting.strip().isdecimal() or int(setting) < 1):
        name = "OPJIT_JOBS" if asked is None else "the number of jobs"
        raise OpjitError(f"expected a number of parallel builds, 1 or more; {name} is {setting!r}")
    return int(setting or _given() or max(1, min(cpus(root), memory(root) // need)))


def width(need: int) -> int:
    """Return the number of compilers that one build runs at once: `jobs`, and at most MAX_JOBS,
    like for torch's builder.
    """
    limit = os.environ.get("MAX_JOBS", "").strip()
    found = jobs(need)
    return min(found, int(limit)) if limit.isdecimal() and int(limit) else found


def _given() -> int:
    """Return the number in OPJIT_JOBS, which limits the compilers of all builds; 0 without one."""
    setting = os.environ.get("OPJIT_JOBS", "").strip()
    return int(setting) if setting.isdecimal() else 0


@contextmanager
def share(need: int) -> Iterator[None]:
    """Wait for a share of so many bytes, and hold it during the block.

    Without one where no share can be taken, for example because no file can be locked.
    """
    taken = _wait_for_share(need) if need else None
    try:
        yield
    finally:
        if taken is not None:
            fcntl.flock(taken, fcntl.LOCK_UN)  # a forked child also has it
            os.close(taken)


def _wait_for_share(need: int) -> int | None:
    while True:
        try:
            folder = share_folder()
            taken = None if folder is None else _take(need, folder)
        except BlockingIOError:  # another process is just looking
            taken = None
        except OSError:
            return None
        if folder is None or taken is not None:
            return taken
        processes.pause(_POLL)


def share_folder() -> Path | None:
    """Return the folder of the shares of all processes with the limits of this one, or None if other users could write there."""
    from opjit.store import lock

    limited = [
        str(group)
        for group in _groups(Path("/"))
        if _limit(group) < _UNLIMITED or _read_text(group / "cpu.max")[:1].isdecimal()
    ]
    limits = repr((sorted(os.sched_getaffinity(0)), limited)).encode()
    files.make_private(lock.folder())
    if files.trust_problem(lock.folder()) is not None:
        return None  # nothing is made through another user's link or in another user's folder
    folder = lock.folder() / f"shares-{files.sha256(limits)[:16]}"
    files.make_private(folder)
    return folder


def _take(need: int, folder: Path) -> int | None:
    """Return the descriptor of a share, or None if other processes leave too little for it now.

    A small op waits for a large extension's memory, not for its CPU. Somebody always has a share.
    """
    with _locked(folder / "gate"):
        held = _held(folder)
        number = _given()
        free = memory()
        # The free memory when no process had a share.
        total = min((each for _, each in held), default=free)
        scarce = not number and (sum(each for each, _ in held) + need > total or need > free)
        if held and (scarce or sum(each <= need for each, _ in held) >= (number or cpus())):
            return None
        taken = os.open(
            folder / f"{need}.{total}.{os.getpid()}.{os.urandom(8).hex()}", _NEW | os.O_EXCL, 0o600
        )
        fcntl.flock(taken, fcntl.LOCK_EX)
        return taken


def _held(folder: Path) -> list[tuple[int, int]]:
    """Return the bytes of each share, and of all at its time. That of a stopped process, which may never go on, does not count."""
    found = []
    for path in folder.glob("*.*.*.*"):
        need, total, process, _ = path.name.split(".")
        with suppress(BlockingIOError), _locked(path):
            path.unlink()  # nobody has it any more
            continue
        if ") T" not in _read_text(Path("/proc", process, "stat")):
            found.append((int(need), int(total)))
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file. Raises BlockingIOError if another process has locked it."""
    with open(path, "ab", opener=lambda name, _: os.open(name, _NEW, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


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
        if (limit := _limit(group)) < _UNLIMITED:
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


def _limit(group: Path) -> int:
    return _number(
        r"(\d+)",
        _read_text(group / "memory.max") or _read_text(group / "memory.limit_in_bytes"),
        _UNLIMITED,
    )


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

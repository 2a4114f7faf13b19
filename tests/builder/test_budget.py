"""How many compilers at once: what this machine, its control groups and the user allow, read from trees that pose as /proc and /sys."""

import os
from pathlib import Path

import pytest

from opjit.builder import budget
from opjit.errors import OpjitError

GIB = budget.GIB


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def tree(root: Path, cgroup: str, files: dict[str, str], available: int = 256 * GIB) -> Path:
    """A root with /proc and control groups; file names start below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {available // 512} kB\nMemAvailable:   {available // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_without_limits_the_cpus_of_the_affinity_are_all_used(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/user.slice\n",
        {"user.slice/cpu.max": "max 100000", "user.slice/memory.max": "max"},
    )
    assert budget.cpus(root) == 64
    assert budget.memory(root) == 256 * GIB
    assert budget.jobs(budget.C_JOB, root=root) == 64


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("9900000 100000", 64)],
)
def test_a_quota_of_cpu_time_counts_rounded_up(tmp_path: Path, quota: str, cpus: int) -> None:
    assert budget.cpus(tree(tmp_path, "0::/box\n", {"box/cpu.max": quota})) == cpus


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/job/step/task\n",
        {
            "job/cpu.max": "400000 100000",
            "job/step/cpu.max": "max 100000",
            "job/step/task/cpu.max": "800000 100000",
            "job/memory.max": str(8 * GIB),
            "job/memory.current": str(5 * GIB),
            "job/step/task/memory.max": str(6 * GIB),
            "job/step/task/memory.current": str(GIB),
        },
    )
    assert budget.cpus(root) == 4
    assert budget.memory(root) == 3 * GIB
    assert budget.jobs(budget.NVCC_JOB, root=root) == 3


def test_memory_of_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "8:pids:/\n4:cpu,memory:/job/one\n0::/\n",
        {
            "memory/job/one/memory.limit_in_bytes": str(6 * GIB),
            "memory/job/one/memory.usage_in_bytes": str(5 * GIB),
            "memory/job/one/memory.stat": f"cache 7\ninactive_file {GIB}\ntotal_inactive_file {GIB}",
            "memory/job/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert budget.memory(root) == 2 * GIB


def test_files_that_were_read_do_not_count_as_memory_in_use(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/box\n",
        {
            "box/memory.max": str(4 * GIB),
            "box/memory.current": str(4 * GIB),
            "box/memory.stat": f"anon {GIB}\ninactive_file {3 * GIB}\nactive_file 5",
        },
    )
    assert budget.memory(root) == 3 * GIB


@pytest.mark.parametrize(
    "cgroup", ["0::/\n", "0::/../../kubepods/pod1/box\n", "0::/kubepods/pod1/box\n"]
)
def test_a_container_reads_its_own_group_however_it_is_named(tmp_path: Path, cgroup: str) -> None:
    assert budget.cpus(tree(tmp_path, cgroup, {"cpu.max": "200000 100000"})) == 2


def test_little_memory_allows_few_jobs_and_none_still_allows_one(tmp_path: Path) -> None:
    root = tree(tmp_path / "some", "0::/\n", {}, available=2 * GIB)
    assert (budget.jobs(budget.NVCC_JOB, root=root), budget.jobs(budget.C_JOB, root=root)) == (2, 8)
    assert (
        budget.jobs(budget.NVCC_JOB, root=tree(tmp_path / "none", "0::/\n", {}, available=0)) == 1
    )


@pytest.mark.parametrize(
    "text", ["", "nonsense", "0::/\n\n::\n:\n", "0:\n", "4:memory:/docker/ab\n"]
)
def test_a_system_that_tells_nothing_or_nonsense_limits_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    assert budget.jobs(budget.NVCC_JOB, root=tmp_path) == 64


def test_what_the_user_asks_for_is_taken_argument_before_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", "7")
    assert budget.jobs(GIB) == 7
    assert budget.jobs(GIB, 3) == 3
    monkeypatch.setenv("MAX_JOBS", "5")  # torch's
    assert (budget.jobs(GIB), budget.width(GIB)) == (7, 5)
    monkeypatch.setenv("OPJIT_JOBS", "3")
    assert (budget.jobs(GIB), budget.width(GIB)) == (3, 3)
    monkeypatch.setenv("MAX_JOBS", "all")  # torch ignores it, too
    assert budget.width(GIB) == 3


def test_max_jobs_is_the_width_of_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert budget.width(1) == 3


@pytest.mark.parametrize("text", ["many", "0", "-2", "1.5"])
def test_a_number_of_jobs_that_is_none_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", text)
    with pytest.raises(OpjitError, match=r"1 or more; OPJIT_JOBS is"):
        budget.jobs(GIB)

"""How many compilers at once: what this machine, its control groups and the user allow, read from trees that pose as /proc and /sys, and
what processes leave to each other."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opjit import processes
from opjit.builder import budget
from opjit.builder.compile_step import run_tool
from opjit.errors import OpjitError

GIB = budget.GIB
# Holds a share of a byte in a folder until it is killed.
HOLDER = """
import fcntl, os, sys, time
share = os.open(f"{sys.argv[1]}/1.1.{os.getpid()}.holder", os.O_RDWR | os.O_CREAT)
fcntl.flock(share, fcntl.LOCK_EX)
time.sleep(100)
"""
# Ends when as many run as may, or after a second, and says how many there were.
COMPILER = """#!/bin/sh
mkdir %(here)s/running.$$
for i in 1 2 3 4 5 6 7 8 9 10; do n=$(ls -d %(here)s/running.* | wc -l); [ $n -ge %(most)s ] && break; sleep 0.1; done
sleep 0.1; ls -d %(here)s/running.* | wc -l >> %(here)s/counts
rmdir %(here)s/running.$$; touch $2
"""


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


def test_max_jobs_is_the_width_of_one_build_and_another_build_does_not_wait_for_it(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setattr(budget, "cpus", lambda: 2)
    with budget.share(1), budget.share(1):
        assert len(shares(alone)) == 2


@pytest.mark.parametrize("text", ["many", "0", "-2", "1.5"])
def test_a_number_of_jobs_that_is_none_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", text)
    with pytest.raises(OpjitError, match=r"1 or more; OPJIT_JOBS is"):
        budget.jobs(GIB)


# --- shares among processes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shares of nobody else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("OPJIT_JOBS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    folder = budget.share_folder()
    assert folder is not None
    return folder


def shares(folder: Path) -> list[Path]:
    return [*folder.glob("*.*.*.*")]


def use_share(need: int) -> bool:
    with budget.share(need):
        return True


@pytest.mark.parametrize(("setting", "most"), [("OPJIT_JOBS=2", 2), ("", 1)])
def test_two_builds_of_many_files_share_what_there_is(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, most: int
) -> None:
    if setting:
        monkeypatch.setenv(*setting.split("="))
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER % {"here": tmp_path, "most": most})
    compiler.chmod(0o755)

    need = GIB if setting else budget.memory() * 2 // 3  # one fits

    def built(number: int) -> None:
        run_tool([str(compiler), "source", f"{number}.o"], tmp_path, need)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(built, range(6)))
    counts = (tmp_path / "counts").read_text().split()
    assert (len(counts), max(map(int, counts))) == (6, most)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_for_a_killed_or_a_stopped_process(
    alone: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", "1")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(alone)]) as holder:
        while not shares(alone):
            time.sleep(0.01)
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(use_share, GIB)
            with pytest.raises(futures.TimeoutError):
                waiter.result(0.3)
            holder.send_signal(number)
            assert waiter.result(20)
        holder.kill()


def test_a_small_compiler_waits_for_no_large_one_s_cpu(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", "1")
    with ThreadPoolExecutor(1) as pool:
        with budget.share(2), budget.share(1):
            another = pool.submit(use_share, 1)
            with pytest.raises(futures.TimeoutError):
                another.result(0.3)
        assert another.result(20)


def test_an_interrupt_ends_the_wait_for_a_share(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", "1")

    def interrupted() -> None:
        with processes.pool(1) as pool:
            pool.submit(use_share, 1)
            raise KeyboardInterrupt

    with budget.share(1), pytest.raises(KeyboardInterrupt):
        interrupted()  # it does not wait for the share


def test_a_process_that_can_take_no_share_builds_all_the_same(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.parent.chmod(0o777)  # others could write there
    assert use_share(GIB)
    assert shares(alone) == []


def test_nothing_is_made_through_a_link_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / f"opjit-{os.geteuid()}").symlink_to(home)
    assert use_share(GIB)
    assert list(home.iterdir()) == []

"""Several GPUs: a process judges on each, and workers and candidates are dealt over them."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opjit import backends
from opjit.errors import DeviceUnavailable, UnknownOp
from opjit.judge import Judge, scheduler
from opjit.judge.gpus import GpuProcesses, visible_gpus
from tests.helpers import elementwise

SCALE = str(Path(__file__).parent / "scale")
RIGHT = '#include "opjit.h"' + elementwise("scale", "(float)a * from[i]", "double a, ")
WRONG = RIGHT.replace("(float)a", "2 * (float)a")
ON_THE_CPU = {"task": SCALE, "device": "cpu", "seconds": 10.0}


@pytest.fixture
def two() -> Iterator[GpuProcesses]:
    judges = GpuProcesses(["0", "GPU-1f"], 2, ON_THE_CPU)
    judges.start()
    yield judges
    judges.close()


def _zygote(process: int) -> int:
    """The only child of a judge's process."""
    [found] = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(found)


def test_a_process_judges_on_each_gpu_and_if_one_ends_the_other_judges_on(
    two: GpuProcesses,
) -> None:
    seen = []
    for process in two.processes:
        words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        seen += [word for word in words if word.startswith(b"CUDA_VISIBLE_DEVICES=")]
    assert seen == [b"CUDA_VISIBLE_DEVICES=0", b"CUDA_VISIBLE_DEVICES=GPU-1f"]

    zygotes = [_zygote(process.pid) for process in two.processes]
    assert len({*zygotes}) == 2
    with ThreadPoolExecutor(2) as threads:
        right, wrong = threads.map(two.judge, [RIGHT, WRONG], ["a.c", "b.c"])
    assert right.verdict in ("correct", "noisy"), right
    assert (wrong.verdict, wrong.candidate) == ("wrong", "b.c")

    os.kill(two.processes[0].pid, signal.SIGKILL)
    two.processes[0].wait()
    outcomes: list[str] = []
    for _ in range(4):
        try:
            outcomes.append(two.judge(WRONG, "a.c").verdict)
        except DeviceUnavailable as error:
            outcomes.append(str(error))
    ended = "the process that judges on one of the GPUs ended"
    assert sorted(outcomes) == [ended, ended, "wrong", "wrong"]

    two.close()
    assert [process.poll() for process in two.processes] == [-signal.SIGKILL, -signal.SIGTERM]
    for zygote in zygotes:
        while Path(f"/proc/{zygote}").exists():
            time.sleep(0.01)


class _Failing:
    """A judge of which one candidate is slow, and another breaks it."""

    def __init__(self, workers: int) -> None:
        self.start = self.close = lambda: None

    def judge(self, text: str, name: str) -> str:
        if text == "broken":
            raise BrokenPipeError("zygote")
        if text == "slow":
            time.sleep(0.5)
        return f"verdict on {name}"


def test_a_failure_and_an_interrupted_call_leave_the_next_verdicts_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "Judge", _Failing)
    judges = GpuProcesses(["0"], 1, {})
    [(ours, theirs)] = judges._pipes
    judges._free.put(ours)
    end = str(os.dup(theirs.fileno()))
    theirs.close()
    thread = threading.Thread(target=scheduler.judge_until_closed, args=("{}", end))
    thread.start()
    with pytest.raises(DeviceUnavailable, match="BrokenPipeError"):
        judges.judge("broken", "a.c")

    ours.send((10, "slow", "b.c"))  # a call whose caller was interrupted
    assert str(judges.judge("right", "c.c")) == "verdict on c.c"
    ours.close()
    thread.join()


def test_an_error_of_the_task_is_raised_as_without_processes() -> None:
    judges = GpuProcesses(["0", "1"], 2, {**ON_THE_CPU, "task": "no_such_op"})
    with pytest.raises(UnknownOp, match="no_such_op"):
        judges.start()
    assert None not in [process.poll() for process in judges.processes]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("GPU-a,GPU-b,5", ["GPU-a", "GPU-b", "5"]),
        ("4,5,6,-1,7", ["4", "5", "6"]),
    ],
)
def test_gpus_are_named_as_this_process_sees_them(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("here", "workers", "used"),
    [
        (["0"], 4, None),  # one GPU needs no other process
        (["0", "1", "2"], 4, ["0", "1", "2"]),
        (["0", "1", "2"], 2, ["0", "1"]),
    ],
)
def test_a_judge_uses_all_gpus(
    monkeypatch: pytest.MonkeyPatch,
    here: list[str],
    workers: int,
    used: list[str] | None,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def processes(names: list[str], count: int, options: dict[str, Any]) -> SimpleNamespace:
        asked.append((names, count, options["task"]))
        return SimpleNamespace()

    cuda = backends.for_device("cuda")
    monkeypatch.setattr(cuda, "available", lambda: None)
    monkeypatch.setattr(scheduler, "visible_gpus", lambda: here)
    monkeypatch.setattr(scheduler, "GpuProcesses", processes)
    monkeypatch.setattr(scheduler, "WorkerPool", lambda *args, **facts: SimpleNamespace())
    judge = Judge(SCALE, device="cuda", workers=workers)
    judge._threads.shutdown()
    assert asked == ([] if used is None else [(used, workers, SCALE)])
    assert bool(judge.pools) == (used is None)

"""The judge: verdicts on many candidates at once."""

import asyncio
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from opjit import backends, files
from opjit.builder import budget
from opjit.errors import DeviceUnavailable, OpjitError
from opjit.judge.gpus import GpuProcesses, visible_gpus
from opjit.judge.pool import WorkerPool
from opjit.judge.trial import Trial
from opjit.judge.verdict import Verdict

_REMEMBERED = 1000  # verdicts


class Judge:
    """Judges candidates for a task, several in parallel.

    Await ``judge(text)`` for the `Verdict` on a candidate.

    Args:
        task: the name or the directory of an op, a KernelBench file, or a task.yml of GPU MODE.
        workers: the number of candidates in parallel. By default, the number that CPUs and memory allow.
        device: ``"cpu"`` or ``"cuda"``. By default, the current accelerator or, without one, the CPU. Without a GPU, ``"cuda"``
            runs the CUDA code of candidates emulated on the CPU, and the best verdict is ``emulated``. opjit uses all GPUs that
            CUDA_VISIBLE_DEVICES lists.
        seconds: the time limit of a call.
        seed: the seed of the hidden values. By default, a random number.
        op: the name of the op to judge, if the task declares several.
        emulate: on a machine with a GPU, first run candidates emulated on the CPU. This finds races that results do not show.

    Example:
        >>> async with opjit.judge.Judge("./scale") as judge:
        ...     verdict = await judge(text)
        >>> verdict.verdict, verdict.median_us
        ('correct', 12.7)
    """

    def __init__(
        self,
        task: str,
        *,
        workers: int | None = None,
        device: str | None = None,
        seconds: float = 10.0,
        seed: int | None = None,
        op: str | None = None,
        emulate: bool = False,
    ) -> None:
        seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        on_cuda = chosen == "cuda" and backends.for_device("cuda").available() is None
        self.workers = workers or budget.jobs(budget.GIB // 2)
        self.pools = list[WorkerPool]()
        self.processes: GpuProcesses | None = None
        self._known = dict[str, Verdict]()
        self._threads = ThreadPoolExecutor(self.workers)
        gpus = visible_gpus()[: self.workers] if on_cuda else []
        if len(gpus) > 1:
            options = {
                "task": task,
                "device": chosen,
                "seconds": seconds,
                "seed": seed,
                "op": op,
                "emulate": emulate,
            }
            self.processes = GpuProcesses(gpus, self.workers, options)
            return

        emulated = chosen == "cuda" and not on_cuda
        pool = WorkerPool(
            task,
            op,
            workers=self.workers,
            device="cpu" if emulated else chosen,
            emulated=emulated,
            seconds=seconds,
            seed=seed,
        )
        self.pools = [pool]
        if emulate and on_cuda:
            self.pools.insert(0, replace(pool, device="cpu", emulated=True))

    async def __aenter__(self) -> "Judge":
        await asyncio.get_running_loop().run_in_executor(None, self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def __call__(self, text: str, name: str = "candidate") -> Verdict:
        """Judge the text of a candidate: C, CUDA, or Python with a ModelNew. The name only appears in messages."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self.judge, text, name
        )

    def start(self) -> None:
        """Start workers and prepare the task. Raises the errors of `Task`."""
        for each in self._parts:
            each.start()

    def close(self) -> None:
        """End all workers, and remove their files."""
        for each in self._parts:
            each.close()
        self._threads.shutdown(cancel_futures=True)

    @property
    def _parts(self) -> list[WorkerPool] | list[GpuProcesses]:
        return self.pools if self.processes is None else [self.processes]

    def judge(self, text: str, name: str = "candidate") -> Verdict:
        """Judge a candidate in this thread."""
        digest = files.sha256(text.encode(errors="replace"))
        known = self._known.get(digest)
        if known is not None:
            return replace(known, candidate=name, cached=True, seconds={})
        if self.processes is not None:
            verdict = self.processes.judge(text, name)
        for pool in self.pools:
            verdict = Trial(pool, text, name).run()
            if verdict.verdict not in ("emulated", "unavailable"):
                break
        if verdict.verdict not in ("noisy", "timeout"):
            self._known[digest] = verdict
            for old in [*self._known][:-_REMEMBERED]:
                self._known.pop(old, None)
        return verdict


def judge_until_closed(options: str, *ends: str) -> None:
    """Judge the candidates of all connections, in a process for one GPU. opjit.judge.gpus starts it."""
    connections = [Connection(int(end)) for end in ends]
    judge = Judge(**json.loads(options), workers=len(ends))
    failure = _outcome(judge.start)
    connections[0].send((0, failure))
    if failure:
        return

    def answer(connection: Connection) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                number, *candidate = connection.recv()
                connection.send((number, _outcome(judge.judge, *candidate)))

    with ThreadPoolExecutor(len(ends)) as threads:
        threads.map(answer, connections)
    judge.close()


def _outcome(function: Callable[..., Any], *arguments: str) -> Any:
    """Return a function's result or its error, because the judge waits for either."""
    try:
        return function(*arguments)
    except OpjitError as error:
        return error
    except Exception as error:
        return DeviceUnavailable(f"the process that judges on one of the GPUs failed: {error!r}")

"""The judge: verdicts on many candidates at once."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from opjit import backends
from opjit.builder import budget
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
            runs the CUDA code of candidates emulated on the CPU, and the best verdict is ``emulated``.
        gpus: the numbers of the GPUs that workers see. By default, all.
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
        gpus: Sequence[int] = (),
        seconds: float = 10.0,
        seed: int | None = None,
        op: str | None = None,
        emulate: bool = False,
    ) -> None:
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        on_cuda = chosen == "cuda" and backends.for_device("cuda").available() is None
        emulated = chosen == "cuda" and not on_cuda

        drawn = random.SystemRandom().getrandbits(31)
        possible = budget.jobs(budget.GIB // 2)
        self.pool = WorkerPool(
            task,
            op,
            workers=workers or possible,
            device="cpu" if emulated else chosen,
            emulated=emulated,
            gpus=gpus,
            seconds=seconds,
            seed=drawn if seed is None else seed,
            is_seeded=seed is not None,
        )
        self.pools = [self.pool]
        if emulate and on_cuda:
            self.pools.insert(0, replace(self.pool, device="cpu", emulated=True))
        self._known: dict[str, Verdict] = {}
        self._threads = ThreadPoolExecutor(self.pool.workers)

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
        for pool in self.pools:
            pool.start()

    def close(self) -> None:
        """End all workers, and remove their files."""
        for pool in self.pools:
            pool.close()
        self._threads.shutdown(cancel_futures=True)

    def judge(self, text: str, name: str = "candidate") -> Verdict:
        """Judge a candidate in this thread."""
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        known = self._known.get(digest)
        if known is not None:
            return replace(known, candidate=name, cached=True, seconds={})
        for pool in self.pools:
            verdict = Trial(pool, text, name).run()
            if verdict.verdict not in ("emulated", "unavailable"):
                break
        if verdict.verdict not in ("noisy", "timeout"):
            self._known[digest] = verdict
            for old in [*self._known][:-_REMEMBERED]:
                self._known.pop(old, None)
        return verdict

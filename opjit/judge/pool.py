"""The judge's workers, and what all trials share: the task, its calls and the device."""

import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from opjit import files
from opjit.ahead.compiler_parts import make_extension_parts
from opjit.builder import budget
from opjit.cpp_extension.identity import Unsupported
from opjit.errors import DeviceUnavailable, OpjitError
from opjit.judge import protocol
from opjit.judge.burst import Burst
from opjit.judge.connection import WorkerConnection, read_memory
from opjit.judge.inputs import PackedInputs
from opjit.judge.protocol import Channel
from opjit.judge.read_write_lock import ReadWriteLock
from opjit.judge.task import BURSTS, Expected, Task
from opjit.judge.verdict import VerdictReached
from opjit.store.store import default_store
from opjit.testing.compare import import_all

_NOT_EMULATED = "this machine has no GPU, and only CUDA code of an op is emulated; use --device cpu for a KernelBench file"
_BENCHES = 16  # processes that launch kernels. More only wait for each other's contexts on the GPU
_AHEAD = 2  # workers that wait for a candidate. With eight, one verdict on an H100 waited 12 s for contexts


class PackedBurst(NamedTuple):
    """Calls with the reference's results, as files for workers and, if they are timed, as calls of the reference."""

    calls: list[Expected]
    inputs: PackedInputs
    reference: Burst | None = None


@dataclass(eq=False)
class WorkerPool:
    """Forks workers for a task. `Judge` explains the arguments.

    Attributes:
        device_lock: shared by trials that use the device, exclusive while one is timed.
    """

    task_path: str
    op_name: str | None
    workers: int
    device: str
    emulated: bool
    seconds: float
    seed: int

    def __post_init__(self) -> None:
        self.device_lock = ReadWriteLock()
        self._forking = threading.Lock()
        self._bench_slots = threading.Semaphore(_BENCHES)
        self._waiting = deque[WorkerConnection]()  # forked ahead
        self._benches = list[WorkerConnection]()  # that wait for a kernel
        self._forks, self._for_zygote = Channel.pair()
        self._ends = WeakSet([self._forks, self._for_zygote])

    def start(self) -> None:
        """Start the process that forks workers, and prepare the task. Raises the errors of `Task`."""
        self.scratch = Path(tempfile.mkdtemp(prefix="opjit-judge-"))
        self._start_zygote()
        try:
            import_all()
            self.task = Task(self.task_path, self.device, self.seed, self.op_name)
            if self.task.op is None:
                if self.emulated:
                    raise DeviceUnavailable(_NOT_EMULATED)
                with suppress(OpjitError, OSError, Unsupported):
                    make_extension_parts(default_store())  # for all workers
            self._forks.receive([protocol.Done])
        except BaseException:
            self.close()
            raise

    def _start_zygote(self) -> None:
        environment = {
            **os.environ,
            # Asking for GPUs must not start CUDA in a process that forks.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "KINETO_LOG_LEVEL": "99",  # torch's profiler
            "OPJIT_CPP_AUTOGRAD": "0",  # no candidate needs a derivative
        }
        if self.device == "cpu":  # a candidate for the CPU gets no GPU
            environment["CUDA_VISIBLE_DEVICES"] = ""
        end = self._for_zygote.end
        arguments = [str(end.fileno()), str(self.scratch)]
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "opjit.judge.keeper", *arguments],
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the judge's stdout may have verdicts
            start_new_session=True,
            env=environment,
        )
        end.close()

    def close(self) -> None:
        """End all workers, and remove their files."""
        with self._forking:  # no worker is forked after this
            for each in self._ends:
                with suppress(OSError):
                    each.end.shutdown(2)  # which also wakes threads that wait for an answer
                each.end.close()
        self.zygote.wait()
        if self.scratch.exists():
            files.remove_tree(self.scratch)

    @cached_property
    def bursts(self) -> list[PackedBurst]:
        """Calls to time. No worker sees a burst twice."""
        found = []
        for number in range(BURSTS):
            samples = self.task.burst(self.seed + number)
            calls = [Expected.of(sample, self.task.results(sample)) for sample in samples]
            # The reference may write its arguments, so it gets other tensors.
            arguments = [sample.values for sample in self.task.burst(self.seed + number)]
            spec = protocol.specs(calls[0].results)
            reference = Burst.of(self.task.reference, arguments, spec, self.device)
            inputs = PackedInputs.of([sample.values for sample in samples], self.key())
            found.append(PackedBurst(calls, inputs, reference))
        return found

    def key(self) -> int | None:
        """Return a key for masked inputs, or None if the judge reads the memory of stopped workers."""
        return None if self.reads_memory else random.SystemRandom().getrandbits(62)

    @cached_property
    def reads_memory(self) -> bool:
        """Whether results are read from stopped workers, which not every system allows a parent."""
        if self.device != "cpu" or self.emulated:
            return False
        try:
            mapped = Path(f"/proc/{self.zygote.pid}/maps").read_text("ascii")
            first = int(mapped.partition("-")[0], 16)
            read_memory(self.zygote.pid, [first], [8])
        except OSError:
            return False
        return True

    @cached_property
    def timed_call(self) -> Expected:
        """A call of the timed sizes, which is checked and not timed."""
        sample = self.task.burst(self.seed + BURSTS)[0]
        return Expected.of(sample, self.task.results(sample))

    @contextmanager
    def bench(self) -> Iterator[WorkerConnection]:
        """Yield a long-lived process for kernels without host code."""
        with self._bench_slots:
            with self._forking:
                bench = self._benches.pop() if self._benches else self._fork(bench=True)
            keep = False
            try:
                yield bench
                keep = True
            except VerdictReached as reached:
                keep = reached.reusable
                raise
            finally:
                if keep:
                    self._benches.append(bench)
                else:
                    bench.close()

    def worker(self) -> WorkerConnection:
        """Return a pre-forked worker for one candidate, with its CUDA context."""
        with self._forking:
            _ = self.task.operators  # what every trial needs is computed once
            if not self.emulated:
                _ = self.bursts, self.timed_call
            while len(self._waiting) <= min(_AHEAD, self.workers):
                self._waiting.append(self._fork(bench=False))
            return self._waiting.popleft()

    def _fork(self, bench: bool) -> WorkerConnection:
        control, for_keeper = Channel.pair()
        requests, for_worker = Channel.pair()
        memory = max(2 * budget.GIB, budget.memory() // (2 * self.workers))
        programs = self.emulated or self.task.op is None
        with for_keeper.end as one, for_worker.end as other:
            message = protocol.Fork(self.device, bench, programs, memory)
            self._forks.send(message, one.fileno(), other.fileno())
        self._ends |= {control, requests}
        return WorkerConnection(control, requests)

"""One candidate on its way through the stages: build, check, measure."""

import pickle
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from opjit.judge import launch, protocol, referee
from opjit.judge.burst import Burst
from opjit.judge.connection import WorkerConnection
from opjit.judge.inputs import PackedInputs
from opjit.judge.operators import families, largest
from opjit.judge.pool import PackedBurst, WorkerPool
from opjit.judge.task import BURSTS, Expected
from opjit.judge.verdict import Tier, Verdict, VerdictReached, Word
from opjit.measure import machine
from opjit.measure.plan import median_and_spread
from opjit.tensors import replica
from opjit.testing.samples import SMALL

_BURSTS = 5  # that are timed, unless they differ
_GROUP = 3  # bursts of which one is logged
_STEADY = 0.1  # no more bursts are needed below this spread
_NOISY = 0.3  # a median with a larger spread means nothing
_BUILD = 300.0  # seconds for all compilers of an op
_IMPORT = 6  # times the limit of a call, for a Python file, which may call compilers
_SLOW_BURST = 1.0  # seconds. A slow candidate makes fewer calls
_FEW_CALLS = 8  # of a burst, unless they come near the limit
_SHORTEST_LIMIT = 1.0  # seconds of a burst
# Bytes of results beyond the expected ones, so that a wrong dtype can be described.
_SLACK = 1 << 20
_SMALLEST = 0.05  # part of a measured time that is left without the messages' time
_NEEDS_GPU = (
    "a kernel with a launch configuration needs a GPU; judge it with --device cuda on a machine with "
    "a GPU, or give it host code, which is emulated without a GPU"
)
_SYSTEM_RANDOM = random.SystemRandom()
_LINE = r":(\d+)[:,]|\bline (\d+)\b|\((\d+)\):"


@dataclass(eq=False)
class Trial:
    """Judges one candidate."""

    pool: WorkerPool
    text: str
    name: str

    def __post_init__(self) -> None:
        self.device_lock = self.pool.device_lock
        self.seconds = self.pool.seconds
        self.task = self.pool.task
        self.tier: Tier = "op"
        if self.task.op is None:
            self.tier = "python"
        elif launch.RULE.search(self.text):
            self.tier = "device"
        elif self.pool.emulated:
            self.tier = "emulated"
        self.facts: dict[str, Any] = {"seconds": {}}
        self.worker: WorkerConnection
        self.calls: list[Expected] = []  # that the candidate made

    def run(self) -> Verdict:
        word: Word
        try:
            word, message = self._on_bench() if self.tier == "device" else self._in_worker()
        except VerdictReached as reached:
            word = reached.word
            message = reached.message
            if self.tier == "device":  # any other process has run the candidate's code
                self.facts |= reached.facts
            line = re.search(_LINE, message)
            if (word == "compile" or " emulated: " in message) and line:
                self.facts["line"] = int(line[line.lastindex or 1])
        return Verdict(self.name, word, self.tier, self.task.name, message, **self.facts)

    def _on_bench(self) -> tuple[Word, str]:
        """Judge a kernel in a process that stays. None of the candidate's host code runs there, so its answers are trusted."""
        pool = self.pool
        if pool.device == "cpu":
            raise VerdictReached("unavailable", _NEEDS_GPU)
        # An earlier kernel may have kept values in the device's memory.
        seed = random.Random(f"{pool.seed} {self.text}").getrandbits(31)
        limit = 4 * self.seconds  # of all calls of a stage
        shared = self.device_lock.shared
        alone = self.device_lock.exclusive
        with pool.bench() as worker:
            worker.ask(_BUILD, "open", task=pool.task_path, op=pool.op_name, seed=pool.seed)
            with self._stage("build"):
                self.facts |= worker.ask(_BUILD, "compile", text=self.text)
            for stage, hold in ("check", shared), ("measure", alone), ("compare", shared):
                with hold(), self._stage(stage):
                    self.facts |= worker.ask(limit, stage, seed=seed)
        return self._rated(self.facts.pop("times"), self.facts.pop("references"))

    def _in_worker(self) -> tuple[Word, str]:
        """Judge in a process that ends with the candidate, and that is not trusted."""
        with closing(self.pool.worker()) as self.worker:
            if self.tier == "emulated":
                return self._emulated()
            empty, *bursts = _SYSTEM_RANDOM.sample(self.pool.bursts, BURSTS)
            # The time of messages, before any code of the candidate runs.
            overhead = min(self._call(empty, 0, self.seconds)[0] for _ in range(3))
            self._load()
            checked = self._check([*self.task.samples, self.pool.timed_call])
            with self._stage("measure"):
                return self._measure(overhead, checked, bursts)

    def _emulated(self) -> tuple[Word, str]:
        """Run CUDA code on the CPU, where races and bad addresses are found. Nothing is timed, and the verdict is never "correct"."""
        self._load()
        small = [call for call in self.task.samples if call.sample.numel <= SMALL]
        self._check(small or self.task.samples[-1:])
        self.facts["sample"] = None
        return (
            "emulated",
            "right, and without a race in the schedules that were tried; it did not run on a GPU",
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.facts["seconds"][name] = time.perf_counter() - started

    def _load(self) -> None:
        """Build and load the candidate. On a CPU, it is stopped while another candidate is timed."""
        limit = _BUILD if self.task.op else _IMPORT * self.seconds
        with self._stage("build"):
            self._send_candidate()
            if self.pool.device == "cpu":
                self.worker.wait_in_turns(self.device_lock, limit)
            loaded, _ = self.worker.answer(protocol.LoadedCandidate, limit)
        frozen = ["frozen results"] if self.pool.reads_memory else []
        self.facts.update(
            key=loaded.key, cached=loaded.cached, isolation=[*loaded.isolation, *frozen]
        )

    def _send_candidate(self) -> None:
        task = self.task
        if task.op is not None:
            how = {"mutates": task.mutates, "emulate": self.pool.emulated}
            schema = task.op.schema.text.partition("::")[2]
            folder = str(task.op.folder)
            self.worker.send(
                "load_op", text=self.text, name=self.name, schema=schema, folder=folder, **how
            )
            return
        with protocol.closing(protocol.sealed(pickle.dumps(task.init))) as init:
            self.worker.send(
                "load_model", init, text=self.text, imports=task.imports, seed=self.pool.seed
            )

    def _check(self, calls: Sequence[Expected]) -> float:
        """Make each call twice, with tensors in different memory. Returns the seconds of the last one, with its messages."""
        nondeterministic = False
        with self._stage("check"):
            for call in calls:
                self.facts["sample"] = str(call.sample)
                copies = [call.sample.map(replica).values for _ in range(2)]
                with closing(PackedInputs.of(copies, self.pool.key())) as inputs:
                    burst = PackedBurst([call] * 2, inputs)
                    is_first = call is self.task.samples[0]
                    seconds, _, content = self._call(
                        burst, 2, self.seconds, log=is_first, fill=True
                    )
                half = len(content) // 2
                nondeterministic |= content[:half] != content[half:]
        self.facts["nondeterministic"] = nondeterministic
        return seconds / 2

    def _measure(
        self, overhead: float, checked: float, bursts: Sequence[PackedBurst]
    ) -> tuple[Word, str]:
        """Time bursts. One of three, which nothing announces, is made in the same way and logged instead.

        `checked` is the seconds of a call with tensors of the same sizes.
        """
        times = list[float]()
        references = list[float]()
        # A busy machine can make any one call look slow.
        fewest = 1 if _FEW_CALLS * checked > self.seconds / 2 else _FEW_CALLS
        count = min(len(bursts[0].calls), max(fewest, int(_SLOW_BURST / checked)))
        limit = max(_SHORTEST_LIMIT, min(2 * self.seconds, 10 * checked * count))
        for number, burst in enumerate(bursts):
            if number % _GROUP == 0:
                logged = number + _SYSTEM_RANDOM.randrange(_GROUP)
            log = number == logged
            longest = limit + self.seconds * log
            took, reference, _ = self._call(burst, count, longest, burst.reference, log=log)
            if log:
                continue
            times.append(max(took - overhead, _SMALLEST * took) / count)
            references.append(reference)
            spreads = (median_and_spread(each[1:])[1] for each in (times, references))
            if len(times) > _BURSTS and max(spreads) <= _STEADY:
                break
        return self._rated(times, references)

    def _call(
        self,
        burst: PackedBurst,
        count: int,
        limit: float,
        reference: Burst | None = None,
        **options: bool,
    ) -> tuple[float, float, bytearray]:
        """Let the worker make the first calls of a burst, and compare all results. With a reference, no other candidate runs at that time.

        Returns the seconds of the burst and of a call of the reference, and the bytes of the results.
        """
        lock = self.device_lock
        with lock.shared():
            size = self._prepare(burst, count, **options)
        with lock.exclusive() if reference else lock.shared():  # short, because other trials wait
            with torch.inference_mode():
                seconds_of_reference = reference.seconds_of_call() if reference else 0.0
            seconds, content = self.worker.run(burst.inputs, size, limit)
        with lock.shared():
            results = self._compare(burst.calls[:count], content, size)
        return seconds, seconds_of_reference, results

    def _prepare(self, burst: PackedBurst, count: int, **options: bool) -> int:
        """Let the worker prepare calls. Returns the most bytes that results may have."""
        spec = protocol.specs(burst.calls[0].results)
        given = {"count": count, "results": spec, **options}
        self.worker.ask(2 * self.seconds, "prepare", *burst.inputs.early, **given)
        return 4 * count * sum(each.nbytes for each in spec) + _SLACK

    def _compare(
        self, calls: Sequence[Expected], content: bytearray | None, limit: int
    ) -> bytearray:
        """Compare the results of calls, which were read or are sent by the worker, and look for evidence of a cheat."""
        described, copied = self.worker.describe(limit, 2 * self.seconds)
        content = copied if content is None else content
        if len(described.results) != len(calls):
            raise protocol.forged(f"results of {len(calls)} calls are expected")
        self.calls += calls
        rest = memoryview(content)
        for row, call in zip(described.results, calls, strict=True):
            results, rest = protocol.decode_results(row, rest)
            self._compare_call(results, call)
        if described.changed:
            raise VerdictReached("wrong", "writes to its inputs, or outside its results")
        if described.evidence:
            raise VerdictReached("cheat", described.evidence)
        elements = sum(largest(call.sample.values) for call in calls)
        ran = families(described.elements, elements // 4)
        fused = {name for name in ran if "::" in name}
        used = fused or self.task.operators
        if used and used <= ran:
            raise VerdictReached(
                "cheat", f"computes the result with torch's operators: {', '.join(sorted(used))}"
            )
        return content

    def _compare_call(self, got: list[Any], call: Expected) -> None:
        others = (each.results for each in self.calls if each is not call)
        found = referee.compare(got, call, others)
        error = referee.max_error(got, call.results)
        self.facts["max_error"] = max(error, self.facts.get("max_error", 0.0))
        if found is not None:
            self.facts["sample"] = str(call.sample)
            self.facts["tolerance"] = [*call.within[0]] if call.within else None
            raise VerdictReached(*found)

    def _rated(self, times: Sequence[float], references: Sequence[float]) -> tuple[Word, str]:
        """Return the verdict on a correct candidate by the seconds of a call in each burst."""
        device = self.pool.device
        timed = self.task.timed
        median, spread = median_and_spread(times[1:])  # the first warms up
        reference, reference_spread = median_and_spread(references[1:])
        bound = machine.bound(device, timed.bytes, timed.flops, 4)
        self.facts.update(
            median_us=median * 1e6,
            reference_us=reference * 1e6,
            spread=spread,
            reference_spread=reference_spread,
            sample=None,
            roofline=bound / median if bound else None,
            clock_mhz=machine.megahertz(device),
        )

        may_be_cached = machine.cache_bytes(device) // timed.calls  # bytes of each call
        least = machine.bound(device, max(0, timed.bytes - may_be_cached), timed.flops, 1)
        shortfall = 0.0 if least is None else least / median - 1
        if shortfall > spread:
            return "cheat", "is faster than the device can move its bytes"
        if shortfall > 0 or spread > _NOISY:
            return "noisy", "right, but its timings vary too much"
        if reference_spread > _NOISY:
            return "noisy", "right, but the timings of the reference vary too much"
        return "correct", "nondeterministic" if self.facts["nondeterministic"] else ""

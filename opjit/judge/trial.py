"""One candidate on its way through the stages: build, check, measure."""

import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from opjit.declare.sample import tensors_of
from opjit.judge import launch, protocol, referee
from opjit.judge.connection import Frozen, WorkerConnection, read_memory
from opjit.judge.pool import WorkerPool
from opjit.judge.protocol import TensorSpec, Untrusted, closing
from opjit.judge.task import Expected
from opjit.judge.verdict import Tier, Verdict, VerdictReached, Word
from opjit.measure import machine
from opjit.measure.plan import median_and_spread
from opjit.testing.compare import tolerance
from opjit.testing.samples import SMALL

_BURSTS = 5  # that are timed, unless they differ
_STEADY = 0.1  # no more bursts are needed below this spread
_NOISY = 0.3  # a median with a larger spread means nothing
_BUILD = 300.0  # seconds for all compilers of a candidate
_SLOW_BURST = 1.0  # seconds. A slow candidate makes fewer calls
_FEW_CALLS = 8  # of a burst, unless they come near the limit
_SHORTEST_LIMIT = 1.0  # seconds of a burst
_FILES = 256 << 20  # bytes of a file that a library may write, such as stderr
# Bytes of results beyond the expected ones, so that a wrong dtype can be described.
_SLACK = 1 << 20
_SMALLEST = 0.05  # part of a measured time that is left without the messages' time
_NEEDS_GPU = (
    "a kernel with a launch configuration needs a GPU; judge it with --device cuda on a machine with "
    "a GPU, or give it host code, which is emulated without a GPU"
)
_LINE = re.compile(r":(\d+)[:,]|\bline (\d+)\b|\((\d+)\):")


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
        elif self.pool.emulated:
            self.tier = "emulated"
        elif launch.RULE.search(self.text):
            self.tier = "device"
        self.facts: dict[str, Any] = {"seconds": {}}
        self.worker: WorkerConnection
        self.latency: float | None = None

    def run(self) -> Verdict:
        word: Word
        try:
            needs_gpu = self.task.op is not None and launch.RULE.search(self.text)
            if needs_gpu and self.pool.device == "cpu":
                raise VerdictReached("unavailable", _NEEDS_GPU)
            ways = {"device": self._on_bench, "emulated": self._emulated}
            word, message = ways.get(self.tier, self._in_worker)()
        except VerdictReached as reached:
            word = reached.word
            message = reached.message
            self.facts |= reached.facts
            line = _LINE.search(message)
            if (word == "compile" or " emulated: " in message) and line:
                self.facts["line"] = int(line[line.lastindex or 1])
        except Untrusted as error:
            word = "cheat"
            message = f"writes to the pipes of the judge: {error}"
        return Verdict(self.name, word, self.tier, self.task.name, message, **self.facts)

    def _on_bench(self) -> tuple[Word, str]:
        """Judge a kernel in a process that stays. None of the candidate's host code runs there, so its answers are trusted."""
        pool = self.pool
        seed = pool.seed if pool.is_seeded else random.SystemRandom().getrandbits(31)
        limit = 4 * self.seconds  # of all calls of a stage
        with pool.worker(bench=True) as worker:
            opening = protocol.Open(pool.task_path, pool.op_name, pool.seed)
            worker.ask(opening, protocol.Done, seconds=_BUILD)
            with self._stage("build"):
                compiling = protocol.CompileKernel(self.text)
                compiled, _ = worker.ask(compiling, protocol.CompiledKernel, seconds=_BUILD)
            self.facts.update(
                registers=compiled.registers, spills=compiled.spills, isolation=["no host code"]
            )

            with self.device_lock.shared(), self._stage("check"):
                checked, _ = worker.ask(protocol.CheckKernel(seed), protocol.Checked, seconds=limit)
            with self.device_lock.exclusive(), self._stage("measure"):
                timed, _ = worker.ask(protocol.TimeKernel(seed), protocol.Timed, seconds=limit)
            with self.device_lock.shared(), self._stage("compare"):
                compared, _ = worker.ask(
                    protocol.CompareKernel(seed), protocol.Compared, seconds=limit
                )
        error = max(checked.max_error, compared.max_error)
        self.facts.update(max_error=error, nondeterministic=checked.nondeterministic)
        return self._rated(timed.seconds, timed.references)

    def _in_worker(self) -> tuple[Word, str]:
        """Judge in a process that ends with the candidate, and that is not trusted."""
        on_gpu = self.pool.device == "cuda"
        with self.pool.worker() as self.worker:
            self.latency = self._message_time()
            with nullcontext() if on_gpu else self.device_lock.shared(), self._stage("build"):
                self._build()
            with self._stage("check"):
                for call in self.task.samples:
                    self._check(call)
                checked = self._check(self.pool.timed_call)
            with self._stage("measure"):
                return self._measure(checked)

    def _emulated(self) -> tuple[Word, str]:
        """Run CUDA code on the CPU, where races and bad addresses are found. Nothing is timed, and the verdict is never "correct"."""
        small = [call for call in self.task.samples if call.sample.numel <= SMALL]
        with self.pool.worker() as self.worker:
            with self._stage("build"):
                self._build()
            with self._stage("check"):
                for call in small or self.task.samples[-1:]:
                    self._check(call)
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

    def _message_time(self) -> float | None:
        """Return the seconds of a burst without calls, measured before any code of the candidate runs.

        None if this worker cannot be read while it is stopped, so that it has to copy its results.
        """
        if self.pool.device != "cpu":
            return None
        found = []
        for _ in range(3):
            frozen = self.worker.freeze(protocol.Probe(), self.seconds)
            try:
                read_memory(frozen.pid, frozen.addresses[0], [8])
            except OSError:  # the system does not let a parent read its children
                return None
            finally:
                self.worker.resume()
            found.append(frozen.seconds)
        return min(found)

    def _build(self) -> None:
        if self.task.op is None:
            loading = protocol.LoadModel(self.text, self.task.imports, self.pool.seed)
            with closing(protocol.serialize(self.task.init)) as init:
                loaded, _ = self.worker.ask(loading, protocol.LoadedCandidate, init, seconds=_BUILD)
        else:
            building = protocol.Build(
                self.text,
                self.name,
                self.task.op.schema.text.partition("::")[2],
                self.task.mutates,
                str(self.task.op.folder),
                self.pool.emulated,
            )
            built, _ = self.worker.ask(building, protocol.Built, seconds=_BUILD)
            self.facts.update(key=built.key, cached=built.cached)
            limit = _FILES + 4 * self.pool.largest_results
            loaded, _ = self.worker.ask(
                protocol.Load(limit), protocol.LoadedCandidate, seconds=self.seconds
            )
        frozen = ["frozen results"] if self.latency is not None else []
        self.facts["isolation"] = [*loaded.isolation, *frozen]

    def _check(self, call: Expected) -> float:
        """Call twice and compare. Returns the seconds of a call, with its messages."""
        self.facts["sample"] = str(call.sample)
        limit = 4 * protocol.size_of(protocol.specs(call.results)) + _SLACK
        is_first = call is self.task.samples[0]
        is_logged = is_first or (not self.pool.emulated and call is self.pool.timed_call)
        asked = protocol.CallTwice(limit, log=is_logged)
        with (
            self.device_lock.shared(),
            closing(protocol.serialize(call.sample.values)) as inputs,
        ):
            started = time.perf_counter()
            answer, files = self.worker.ask(
                asked, protocol.Called, inputs, seconds=self.seconds, data_limit=limit
            )
            seconds = (time.perf_counter() - started) / 2
        if len(answer.results) != 2 or len(files) != 1:
            raise Untrusted("results of two calls are expected")
        view = memoryview(files[0])
        size = protocol.size_of(answer.results[0])
        for described, data in zip(answer.results, (view[:size], view[size:]), strict=True):
            self._compare(protocol.decode_results(described, data), call, self.task.samples)

        if answer.changed:
            raise VerdictReached("wrong", "writes to its inputs, or outside its results")
        if answer.evidence:
            raise VerdictReached("cheat", answer.evidence)
        if self.task.operators and self.task.operators <= {*answer.operators}:
            names = ", ".join(sorted(self.task.operators))
            raise VerdictReached("cheat", f"computes the result with torch's operators: {names}")
        differs = view[:size] != view[size:]
        self.facts["nondeterministic"] = self.facts.get("nondeterministic", False) or differs
        return seconds

    def _compare(self, got: list[Any], call: Expected, all_calls: Sequence[Expected]) -> None:
        others = (each.results for each in all_calls if each is not call)
        found = referee.compare(got, call, others)
        error = referee.max_error(got, call.results)
        self.facts["max_error"] = max(error, self.facts.get("max_error", 0.0))
        if found is not None:
            tensors = tensors_of(call.results)
            self.facts["sample"] = str(call.sample)
            self.facts["tolerance"] = [*tolerance(tensors[0], call.sample)] if tensors else None
            raise VerdictReached(*found)

    def _measure(self, checked: float) -> tuple[Word, str]:
        """Time bursts. `checked` is the seconds of a call with tensors of the same sizes."""
        times = []
        references = []
        bursts = self.pool.bursts
        for burst in random.SystemRandom().sample(bursts, len(bursts)):
            count = min(len(burst.calls), self._calls_of_burst(checked))
            limit = max(_SHORTEST_LIMIT, min(2 * self.seconds, 10 * checked * count))
            spec = protocol.specs(burst.calls[0].results)
            preparing = protocol.Prepare(spec, count)
            with self.device_lock.shared():
                self.worker.ask(preparing, protocol.Done, burst.arguments, seconds=2 * self.seconds)
            with self.device_lock.exclusive():  # as short as possible, because other trials wait
                with torch.inference_mode():
                    burst.reference.arm()
                    references.append(burst.reference.run() / len(burst.calls))
                self.worker.ask(protocol.Arm(), protocol.Done, seconds=self.seconds)
                seconds, frozen = self._run(limit)
            times.append(seconds / count)
            with self.device_lock.shared():
                data = None if frozen is None else self._read(frozen, [*spec] * count)
                self._compare_burst(burst.calls[:count], spec, data)
            if len(times) > _BURSTS and median_and_spread(times[1:])[1] <= _STEADY:
                break
        return self._rated(times, references)

    def _calls_of_burst(self, checked: float) -> int:
        """Return how many calls a slow candidate makes. A busy machine can make any one call look slow."""
        fewest = 1 if _FEW_CALLS * checked > self.seconds / 2 else _FEW_CALLS
        return max(fewest, int(_SLOW_BURST / checked))

    def _run(self, limit: float) -> tuple[float, Frozen | None]:
        """Run the burst. Returns its seconds, and the stopped worker if its results are read from outside."""
        if self.latency is None:
            started = time.perf_counter()
            self.worker.ask(protocol.Run(freeze=False), protocol.Ran, seconds=limit)
            return time.perf_counter() - started, None
        frozen = self.worker.freeze(protocol.Run(freeze=True), limit)
        return max(frozen.seconds - self.latency, _SMALLEST * frozen.seconds), frozen

    def _read(self, frozen: Frozen, expected: list[TensorSpec]) -> bytearray:
        """Read the results of a stopped worker, and let it go on."""
        addresses = [each for row in frozen.addresses for each in row if each]
        sizes = [each.nbytes for each in expected if each.nbytes]
        try:
            if len(addresses) != len(sizes):  # the description shows the difference
                return bytearray()
            return bytearray().join(read_memory(frozen.pid, addresses, sizes))
        except OSError as error:
            raise Untrusted(f"results at addresses that cannot be read: {error}") from None
        finally:
            self.worker.resume()

    def _compare_burst(
        self, calls: list[Expected], spec: tuple[TensorSpec, ...], data: bytearray | None
    ) -> None:
        """Compare all results of a burst, which were read or are sent by the worker."""
        limit = 4 * len(calls) * protocol.size_of(spec) + _SLACK
        answer, files = self.worker.ask(
            protocol.Describe(limit),
            protocol.Results,
            seconds=2 * self.seconds,
            data_limit=limit,
        )
        view = memoryview(files[0] if data is None else data)
        if len(answer.results) != len(calls):
            raise Untrusted(f"results of {len(calls)} calls are expected")
        start = 0
        for described, call in zip(answer.results, calls, strict=True):
            got = tuple(each for each in described if isinstance(each, TensorSpec))
            if got != spec:
                shown = ", ".join(map(str, got))
                wanted = ", ".join(map(str, spec))
                raise VerdictReached("wrong", f"expected {wanted}, got {shown}")
            end = start + protocol.size_of(spec)
            results = protocol.decode_results(described, view[start:end])
            self._compare(results, call, [*calls, self.pool.timed_call])
            start = end
        if answer.changed:
            raise VerdictReached(
                "wrong", "writes to the inputs of timed calls, or outside its results"
            )

    def _rated(self, times: Sequence[float], references: Sequence[float]) -> tuple[Word, str]:
        """Return the verdict on a correct candidate by the seconds of a call in each burst."""
        device = self.pool.device
        timed = self.task.timed
        median, spread = median_and_spread(times[1:])  # the first warms up
        bound = machine.bound(device, timed.bytes, timed.flops, 4)
        self.facts.update(
            median_us=median * 1e6,
            reference_us=statistics.median(references[1:]) * 1e6,
            spread=spread,
            sample=None,
            roofline=bound / median if bound else None,
            clock_mhz=machine.megahertz(device),
        )

        may_be_cached = machine.cache_bytes(device) // timed.calls  # bytes of each call
        least = machine.bound(device, max(0, timed.bytes - may_be_cached), timed.flops, 1)
        if least is not None and least > median:
            return "cheat", "is faster than the device can move its bytes"
        if spread > _NOISY:
            return "noisy", "right, but its timings vary too much"
        return "correct", "nondeterministic" if self.facts["nondeterministic"] else ""

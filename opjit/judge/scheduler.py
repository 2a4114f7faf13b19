"""Gives each candidate a child, takes it through its stages, and stops at the first that fails."""

import asyncio
import hashlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import files
from opjit.builder import budget
from opjit.cpp_extension import light
from opjit.declare.sample import tensors_of
from opjit.judge import launch, referee
from opjit.judge.burst import Burst
from opjit.judge.task import ROUNDS, Expected, Task
from opjit.judge.verdict import Ended, Verdict, Word
from opjit.judge.wire import Channel, Untrusted, closing, content, saved, spec, unpacked
from opjit.measure import machine
from opjit.measure.plan import median_and_spread
from opjit.recipe import toolchain
from opjit.store.store import Store, default_root
from opjit.testing.compare import import_all, tolerance

_ROUNDS = 5  # timed bursts, unless they differ
_STEADY, _NOISY = (
    0.1,
    0.3,
)  # spreads: below the first no more bursts are needed; a median with more than the second tells nothing
_BUILD = 300.0  # seconds for all compilers of a candidate
_REMEMBERED = 1000  # verdicts
_MOST_AHEAD = 2  # children that wait for a candidate: on an H100, one verdict waited 12 s while eight made their CUDA contexts


class _Lane(NamedTuple):
    """The judge's ends of a child's sockets."""

    leash: Channel
    job: Channel

    def ask(
        self, message: dict[str, Any], *descriptors: int, seconds: float
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Send a message and wait for its answer. Raises Ended if there is none, or if it is an error."""
        with suppress(ConnectionError):  # the answer says why
            self.job.send(message, *descriptors)
        seconds *= max(
            1.0, min(10.0, os.getloadavg()[0] / budget.cpus())
        )  # a busy machine is nobody's endless loop
        try:
            answer, received = self.job.receive(seconds)
            data = [content(each) for each in received]
        except TimeoutError:
            raise Ended("timeout", f"did not return within {seconds:g} s") from None
        except EOFError:
            raise self._death() from None
        if "error" in answer:
            word: Word = (
                answer["error"] if answer["error"] in ("compile", "cheat", "crash") else "wrong"
            )
            raise Ended(word, str(answer["message"]), answer.get("facts"), answer["reusable"])
        return answer, data

    def _death(self) -> Ended:
        with suppress(EOFError, TimeoutError):
            said, _ = self.leash.receive(10)
            if "SIGSYS" in said["ended"]:
                return Ended(
                    "cheat",
                    "makes a system call that computing does not need, for which the kernel ended it",
                )
            return Ended(
                "crash", ": ".join([said["ended"], *said["stderr"].strip().splitlines()[-1:]])
            )
        return Ended("crash", "its process ended")

    def end(self) -> None:
        self.job.end.close()
        self.leash.end.close()


class Judge:
    """Judges candidates for a task, many at once.

    Args:
        task: the path of an op's folder, an op's name, or the path of a KernelBench file.
        workers: candidates at once; default: as CPUs and memory allow.
        device: ``"cpu"`` or ``"cuda"``; default: the current accelerator, else the CPU.
        gpus: the numbers of the GPUs that children see; default: all.
        seconds: the limit for a call.
        seed: decides the hidden values; default: one that nobody knows.
        op: which op of a folder that declares several.

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
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.workers, self.seconds = workers or budget.jobs(budget.GIB // 2), seconds
        self.seed, self.fixed = (
            random.SystemRandom().getrandbits(31) if seed is None else seed,
            seed is not None,
        )
        self._where, self._op, self._gpus = task, op, gpus
        self._slots, self._forking, self._timing = (
            threading.Semaphore(self.workers),
            threading.Lock(),
            threading.Lock(),
        )
        self._waiting: dict[bool, deque[_Lane]] = {
            False: deque(),
            True: deque(),
        }  # children forked ahead, and benches
        self._measuring: list[None] = []
        self._quiet = False
        self._known: dict[str, Verdict] = {}
        self._pool, self._lanes = ThreadPoolExecutor(self.workers), [*Channel.pair()]

    async def __aenter__(self) -> "Judge":
        await asyncio.get_running_loop().run_in_executor(None, self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def __call__(self, text: str, name: str = "candidate") -> Verdict:
        """Judge the text of a candidate: C, CUDA, or Python with a ModelNew. Its name is only shown."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.judge, text, name)

    def start(self) -> None:
        """Start the zygote and prepare the task. Raises what `Task` raises."""
        self._scratch = Path(tempfile.mkdtemp(prefix="opjit-judge-"))
        self._control, theirs = self._lanes
        environment = {
            **os.environ,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs must not start CUDA in a process that forks
            **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, self._gpus))} if self._gpus else {}),
        }
        self._zygote = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "opjit.judge.zygote",
                str(theirs.end.fileno()),
                str(self._scratch),
            ],
            pass_fds=[theirs.end.fileno()],
            start_new_session=True,
            env=environment,
        )
        theirs.end.close()
        try:
            import_all()
            self.task = Task(self._where, self.device, self.seed, self._op)
            self._control.receive()
            store = Store(default_root())
            if self.task.op is None and (compiler := toolchain.find_cxx(store.notes)) is not None:
                with suppress(OSError):
                    light.compiled_binding(
                        store.base, compiler
                    )  # children have caches of their own, above this one
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all children, and remove what they left."""
        for each in self._lanes:
            with suppress(OSError):
                each.end.shutdown(2)  # also wakes who waits for an answer
            each.end.close()
        self._zygote.wait()
        if self._scratch.exists():
            files.remove_tree(self._scratch)
        self._pool.shutdown(cancel_futures=True)

    @cached_property
    def bursts(self) -> list[tuple[list[Expected], int, Burst]]:
        """Calls to time in processes of their own, of which none sees one twice; a file of their arguments; and the reference's calls."""
        found = []
        for number in range(ROUNDS):
            samples = self.task.burst(self.seed + number)
            calls = [Expected.of(sample, self.task.results(sample)) for sample in samples]
            own = [
                sample.values for sample in self.task.burst(self.seed + number)
            ]  # which the reference may write
            reference = Burst.of(self.task.reference, own, spec(calls[0].results), self.device)
            found.append((calls, saved([sample.values for sample in samples]), reference))
        return found

    @contextmanager
    def lane(self, bench: bool = False) -> Iterator[_Lane]:
        """Lend a child: forked ahead, with its CUDA context, for one candidate; or a bench for kernels without host code, which stays."""
        waiting = self._waiting[bench]
        with self._forking:
            if not bench:
                _ = self.bursts, self.task.samples, self.task.operators  # made once
            while len(waiting) <= (0 if bench else min(_MOST_AHEAD, self.workers)):
                waiting.append(self._fork(bench))
            lane = waiting.popleft()
        keep = False
        try:
            yield lane
            keep = bench
        except Ended as ended:
            keep = bench and ended.reusable
            raise
        finally:
            if keep:
                waiting.appendleft(lane)
            else:
                lane.end()

    def _fork(self, bench: bool) -> _Lane:
        (leash, theirs), (job, its) = Channel.pair(), Channel.pair()
        self._control.send(
            {
                "many": self.task.op is None,
                "memory": max(2 * budget.GIB, budget.memory() // 2),
                "device": self.device,
                "bench": bench,
            },
            theirs.end.fileno(),
            its.end.fileno(),
        )
        theirs.end.close()
        its.end.close()
        self._lanes = [each for each in self._lanes if each.end.fileno() >= 0] + [leash, job]
        return _Lane(leash, job)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Measure while nobody uses the device: each after the other, and the last of those that wait lets the others go on."""
        self._measuring.append(None)
        with self._timing:
            if not self._quiet:
                for _ in range(self.workers):
                    self._slots.acquire()
            self._quiet = True
            try:
                yield
            finally:
                self._measuring.pop()
                if not self._measuring:
                    self._quiet = False
                    self._slots.release(self.workers)

    def judge(self, text: str, name: str = "candidate") -> Verdict:
        """`__call__` for a caller with threads of its own."""
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        known = self._known.get(digest)
        if known is not None:
            return replace(known, candidate=name, cached=True, seconds={})
        verdict = _Trial(self, text, name).run()
        if verdict.verdict not in ("noisy", "timeout"):
            self._known[digest] = verdict
            for old in [*self._known][:-_REMEMBERED]:
                self._known.pop(old, None)
        return verdict


class _Trial:
    """One candidate on its way through the stages."""

    def __init__(self, judge: Judge, text: str, name: str) -> None:
        self.judge, self.task, self.text, self.name = judge, judge.task, text, name
        self.tier = (
            "python" if self.task.op is None else "device" if launch.RULE.search(text) else "op"
        )
        self.facts: dict[str, Any] = {"seconds": {}}

    def run(self) -> Verdict:
        word: Word
        try:
            word, message = self._on_bench() if self.tier == "device" else self._in_child()
        except Ended as ended:
            word, message = ended.word, ended.message
            self.facts |= ended.facts
            if word == "compile" and (
                found := re.search(r":(\d+)[:,]|\bline (\d+)\b|\((\d+)\):", message)
            ):
                self.facts["line"] = int(next(filter(None, found.groups())))
        except (Untrusted, KeyError, TypeError, ValueError, OSError) as error:
            word, message = "cheat", f"writes to the pipes of the judge: {error}"
        return Verdict(self.name, word, self.tier, self.task.name, message, **self.facts)  # type: ignore[arg-type]

    def _on_bench(self) -> tuple[Word, str]:
        """Judge a kernel in a process that stays: whatever it answers is the judge's own."""
        judge = self.judge
        hidden = {
            "seed": judge.seed if judge.fixed else random.SystemRandom().getrandbits(31)
        }  # new for each
        limit = 4 * judge.seconds  # of all calls of a stage
        with judge.lane(bench=True) as lane:
            lane.ask(
                {"do": "open", "task": judge._where, "op": judge._op, "seed": judge.seed},
                seconds=_BUILD,
            )
            with self._stage("build"):
                self.facts |= lane.ask({"do": "kernel", "text": self.text}, seconds=_BUILD)[0]
            with judge._slots, self._stage("check"):
                self.facts |= lane.ask({"do": "check", **hidden}, seconds=limit)[0]
            with judge.alone(), self._stage("measure"):
                times, _ = lane.ask({"do": "time", **hidden}, seconds=limit)
            with judge._slots, self._stage("compare"):
                error = lane.ask({"do": "compare", **hidden}, seconds=limit)[0]["max_error"]
            self.facts["max_error"] = max(error, self.facts["max_error"])
            return self._rated(times["seconds"], times["references"])

    def _in_child(self) -> tuple[Word, str]:
        """Judge in a process that ends with the candidate, and that is not believed."""
        with self.judge.lane() as self.lane:
            with (
                nullcontext() if self.judge.device == "cuda" else self.judge._slots,
                self._stage("build"),
            ):
                self._build()
            with self._stage("check"):
                for call in self.task.samples:
                    with self.judge._slots:
                        self._check(call)
            with self._stage("measure"):
                return self._measure()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.facts["seconds"][name] = time.perf_counter() - started

    def _build(self) -> None:
        message: dict[str, Any] = {"text": self.text, "name": self.name}
        if self.task.op is None:
            with closing(saved(self.task.init)) as init:
                self.facts |= self.lane.ask(
                    {**message, "do": "python", "seed": self.judge.seed}, init, seconds=_BUILD
                )[0]
            return
        message |= {
            "schema": f"judged::{self.task.op.schema.text.partition('::')[2]}",
            "mutates": self.task.mutates,
            "folder": str(self.task.op.folder),
            "operators": self.task.operators,
        }
        self.facts |= self.lane.ask({**message, "do": "build"}, seconds=_BUILD)[0]
        self.facts |= self.lane.ask({"do": "load"}, seconds=self.judge.seconds)[0]

    def _check(self, call: Expected) -> None:
        self.facts["sample"] = str(call.sample)
        with closing(saved(call.sample.values)) as inputs:
            answer, [data] = self.lane.ask({"do": "call"}, inputs, seconds=self.judge.seconds)
        at = [0]
        one, other = (unpacked(each, data, at) for each in answer["results"])
        for got in (one, other):
            self._compare(got, call, self.task.samples)
        if answer["changed"]:
            raise Ended("wrong", "writes to its inputs, or beside its results")
        if answer["replaced"]:
            raise Ended(
                "cheat", f"replaces functions of others: {', '.join(answer['replaced'][:3])}"
            )
        if (
            self.tier == "python"
            and self.task.operators
            and {*self.task.operators} <= {*answer["operators"]}
        ):
            raise Ended(
                "cheat",
                f"calls torch's own operators for the result: {', '.join(self.task.operators)}",
            )
        self.facts["nondeterministic"] = (
            self.facts.get("nondeterministic", False)
            or data[: at[0] // 2] != data[at[0] // 2 : at[0]]
        )

    def _compare(self, got: list[Any], call: Expected, all_calls: Sequence[Expected]) -> None:
        found = referee.compare(got, call, (each.results for each in all_calls if each is not call))
        self.facts["max_error"] = max(
            referee.max_error(got, call.results), self.facts.get("max_error", 0.0)
        )
        if found is not None:
            tensors = tensors_of(call.results)
            self.facts |= {
                "sample": str(call.sample),
                "tolerance": [*tolerance(tensors[0], call.sample)] if tensors else None,
            }
            raise Ended(*found)

    def _measure(self) -> tuple[Word, str]:
        times: list[float] = []
        references: list[float] = []
        limit = self.judge.seconds
        for calls, arguments, reference in random.SystemRandom().sample(
            self.judge.bursts, len(self.judge.bursts)
        ):
            with self.judge._slots:
                self.lane.ask(
                    {"do": "prepare", "results": spec(calls[0].results)},
                    arguments,
                    seconds=limit * 2,
                )
            with self.judge.alone():  # no longer than it takes: the others wait
                with torch.inference_mode():
                    reference.arm()
                    references.append(reference.run() / len(calls))
                self.lane.ask({"do": "arm"}, seconds=limit)
                started = time.perf_counter()
                self.lane.ask({"do": "run"}, seconds=limit * len(calls))
                times.append((time.perf_counter() - started) / len(calls))
            with self.judge._slots:
                answer, [data] = self.lane.ask({"do": "results"}, seconds=limit * 2)
                at = [0]
                for description, call in zip(answer["results"], calls, strict=True):
                    self._compare(unpacked(description, data, at), call, calls)
                if answer["changed"]:
                    raise Ended(
                        "wrong", "writes to the inputs of timed calls, or beside its results"
                    )
            if len(times) > _ROUNDS and median_and_spread(times[1:])[1] <= _STEADY:
                break
        return self._rated(times, references)

    def _rated(self, times: list[float], references: list[float]) -> tuple[Word, str]:
        """Return the verdict on a candidate whose results are right, by the seconds of a call in each burst."""
        device, timed = self.judge.device, self.task.timed
        median, spread = median_and_spread(times[1:])  # the first warms up
        bound = machine.bound(device, timed.bytes, timed.flops, 4)
        self.facts |= {
            "median_us": median * 1e6,
            "reference_us": statistics.median(references[1:]) * 1e6,
            "spread": spread,
            "sample": None,
            "roofline": bound / median if bound else None,
            "clock_mhz": machine.clock(device),
        }
        held = (
            machine.cache_bytes(device) // timed.calls
        )  # bytes of a call that may stay in the cache
        if (machine.bound(device, max(0, timed.bytes - held), timed.flops, 1) or 0) > median:
            return (
                "cheat",
                "takes less time than the device needs for its bytes: it does not do the work",
            )
        if spread > _NOISY:
            return "noisy", "right; the machine is too busy to say how fast"
        return "correct", "nondeterministic" * self.facts["nondeterministic"]

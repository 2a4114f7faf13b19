"""The bench of the device tier: a process that stays for many candidates. No host code of theirs runs here, but a kernel can write anywhere
in the device's memory: nothing that lay there is believed, and inputs are drawn again from their seed. Benches share the device, so each
waits for it rarely: calls of the same shapes are compared in one go, and only where a result differs, one by one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from opjit import backends
from opjit.backends import targets
from opjit.builder import glue
from opjit.declare.sample import Sample, tensors_of
from opjit.errors import DeclarationError
from opjit.judge import launch, referee, screen, wire
from opjit.judge.burst import Burst, changed, storages
from opjit.judge.task import Expected, Task, tolerances
from opjit.judge.verdict import Ended
from opjit.testing.compare import Tolerance
from opjit.testing.samples import replica

_ROUNDS = 7  # bursts, the one to warm up included
_CALLS = 32  # of a burst


class _Run(NamedTuple):
    """Calls of the same shapes, with the memory of their results."""

    inputs: list[Any]
    results: launch.GuardedResults
    functions: list[Callable[[], None]]


class Bench:
    """Runs one kernel after another. Each `on_` method answers one kind of message."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.kernel: launch.LoadedKernel | None = None
        self.runs: list[_Run] = []
        self.bursts: list[Burst] = []
        self.references: list[Burst] = []

    def on_open(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Read the task, and prepare the reference's calls, if that is not done."""
        if self.references:
            return {}
        self.task = Task(message["task"], self.device, message["seed"], message["op"])
        assert self.task.op is not None
        if any(
            changed(one.values, other.values)
            for one, other in zip(self.task.hidden(0), self.task.hidden(0), strict=True)
        ):
            raise DeclarationError(
                f"{self.task.name}: samples differ from time to time; draw them with torch's generator"
            )
        schema = self.task.op.schema
        self.made = len(glue.c_names(schema)) - len(
            schema.arguments
        )  # results that are not arguments
        results = self.task.results(self.task.timed.sample)
        self.spec, self.within = wire.spec(results), tolerances(self.task.timed.sample, results)
        self.references = [
            Burst.of(self.task.reference, calls, self.spec, self.device)
            for calls in map(self._calls, range(_ROUNDS))
        ]
        return {}

    def _calls(self, seed: int) -> list[Any]:
        return [call.values for call in self.task.burst(seed, _CALLS)]

    def on_kernel(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Compile and load device code."""
        self._forget()
        screen.check_source(message["text"])
        assert self.task.op is not None
        compiled = launch.compile_text(
            message["text"],
            self.task.op.schema.text,
            targets.here(backends.for_device("cuda")).arch,
        )
        self.kernel = compiled.load()
        return {
            "registers": compiled.registers,
            "spills": compiled.spills,
            "isolation": ["no host code"],
        }

    def on_check(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Make each hidden call twice, and compare the results; then prepare the timed calls."""
        runs = [self._called_twice(sample) for sample in self.task.hidden(message["seed"])]
        pairs = [
            pair
            for run in runs
            if run is not None
            for pair in zip(*self._results(run), strict=True)
        ]
        differ = torch.stack([referee.differ(one, other, _EXACT) for one, other in pairs]).any()
        facts = self._compared(
            (run, [sample] * 2, None)
            for run, sample in zip(runs, self.task.hidden(message["seed"]), strict=True)
            if run is not None
        )
        self.runs = [self._bound(self._calls(number), self.spec) for number in range(_ROUNDS)]
        self.bursts = [
            Burst(run.functions, run.inputs, self.spec, self.device) for run in self.runs
        ]
        return {**facts, "nondeterministic": bool(differ)}

    def on_time(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Time the bursts of the candidate and of the reference in turns. Answers with the seconds of a call in each."""
        found: dict[str, Any] = {"seconds": [], "references": []}
        for number, (run, reference, burst) in enumerate(
            zip(self.runs, self.references, self.bursts, strict=True)
        ):
            for own, new in storages(
                run.inputs, self._calls(message["seed"] + 1 + number)
            ):  # no kernel has seen these
                own.copy_(new)
            run.results.clear()
            for name, each in (("references", reference), ("seconds", burst)):
                each.arm()
                found[name].append(each.run() / len(each.functions))
        return found

    def on_compare(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Compare the results of all timed calls."""
        facts = self._compared(
            (run, self.task.burst(message["seed"] + 1 + number, _CALLS), self.within)
            for number, run in enumerate(self.runs)
        )
        self._forget()
        return facts

    def _called_twice(self, sample: Sample) -> _Run | None:
        """Call with a sample's tensors in other memory; None if the reference refuses the sample. The results' dtypes and shapes come
        from other values, so that no expected result is in the device's memory."""
        try:
            spec = wire.spec(self.task.results(sample.map(torch.zeros_like)))
        except Exception:
            return None
        run = self._bound([sample.map(replica).values for _ in range(2)], spec)
        for function in run.functions:
            function()
        return run

    def _bound(self, inputs: list[Any], spec: Sequence[dict[str, Any]]) -> _Run:
        assert self.kernel is not None
        results = launch.GuardedResults(spec[: self.made], len(inputs), self.device)
        functions = [
            self.kernel.bind(args, kwargs, made)
            for (args, kwargs), made in zip(inputs, results.of_calls, strict=True)
        ]
        return _Run(inputs, results, functions)

    def _forget(self) -> None:
        """Free all that is the last candidate's."""
        self.runs, self.bursts = [], []
        if self.kernel is not None:
            self.kernel.unload()
            self.kernel = None

    def _results(self, run: _Run) -> list[list[torch.Tensor]]:
        """The results of each call, and the arguments that it wrote."""
        return [
            [*made, *(tensors_of(inputs) if self.task.mutates else [])]
            for made, inputs in zip(run.results.of_calls, run.inputs, strict=True)
        ]

    def _compared(
        self, pairs: Iterable[tuple[_Run, list[Sample], list[Tolerance] | None]]
    ) -> dict[str, Any]:
        """Hold calls against what they must be: inputs as drawn again, results within tolerances, and guards. Raises Ended."""
        doubts, errors = (
            list[torch.Tensor](),
            [torch.zeros((), dtype=torch.float64, device=self.device)],
        )
        known = [
            (run, samples, within or tolerances(samples[0], self.task.results(samples[0])))
            for run, samples, within in pairs
        ]
        for run, samples, within in known:
            expected = [self.task.results(sample) for sample in samples]
            for limit, *columns in zip(
                within,
                zip(*self._results(run), strict=True),
                zip(*expected, strict=True),
                strict=True,
            ):
                got, right = map(_stacked, columns)
                doubts.append(referee.differ(got, right, limit))
                errors.append(referee.max_difference(got, right))
            doubts.append(self._beside(run, samples))
        if torch.stack(doubts).any():
            self._find_mistake(known)
        return {"max_error": float(torch.stack(errors).max())}

    def _beside(self, run: _Run, samples: list[Sample]) -> torch.Tensor:
        """Whether calls wrote to their inputs, or beside their results."""
        pairs = (
            [] if self.task.mutates else storages(run.inputs, [sample.values for sample in samples])
        )
        return torch.stack(
            [run.results.overrun(), *(referee.differ(own, new, _EXACT) for own, new in pairs)]
        ).any()

    def _find_mistake(self, pairs: list[tuple[_Run, list[Sample], list[Tolerance]]]) -> None:
        """Raise Ended for the first call that is wrong, in words. NaN where NaN is expected is none."""
        for run, samples, within in pairs:
            beside = bool(self._beside(run, samples))
            for index, (sample, results) in enumerate(
                zip(samples, self._results(run), strict=True)
            ):
                call = Expected(sample, self.task.results(sample), within)
                others = (self.task.results(other) for other in samples[:index])
                found = referee.compare(results, call, others)
                facts = {
                    "max_error": referee.max_error(results, call.results),
                    "sample": str(sample),
                    "tolerance": list(within[0]),
                }
                if found is not None:
                    raise Ended(*found, facts, not beside)
                if beside:
                    raise Ended("wrong", "writes to its inputs, or beside its results", facts)


_EXACT = Tolerance(0, 0)


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape in one, or else as bytes of no meaning, which equal nothing."""
    same = all(each.shape == tensors[0].shape for each in tensors)
    return (
        torch.stack(list(tensors))
        if same
        else torch.full((1,), float("nan"), device=tensors[0].device)
    )

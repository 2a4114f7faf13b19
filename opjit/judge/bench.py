"""The worker of the device tier, which stays for many candidates.

None of their host code runs here, but a kernel can write anywhere in the device's memory. So nothing
read from it is trusted, and inputs are drawn again from their seed. Benches share the device, so each
waits for it rarely: calls of the same shapes are compared together, and one by one only if a result
differs.
"""

from collections.abc import Sequence
from typing import Any

import torch

from opjit import backends, wanted
from opjit.declare.sample import Sample
from opjit.errors import DeclarationError
from opjit.judge import launch, protocol, referee
from opjit.judge.burst import Burst, storages
from opjit.judge.launch import PreparedCalls
from opjit.judge.protocol import Done, TensorSpec
from opjit.judge.task import Expected, Task, tolerances
from opjit.judge.verdict import VerdictReached
from opjit.recipe.schema import c_names
from opjit.tensors import replica, tensors_of
from opjit.testing.compare import Tolerance

_BURSTS = 7  # with the first, which warms up
_CALLS = 32  # of a burst
_EXACT = Tolerance(0, 0)


class Bench:
    """Runs one kernel after another."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.kernel: launch.Kernel | None = None
        self.batches = list[PreparedCalls]()
        self.bursts = list[Burst]()
        self.references = list[Burst]()

    def open(self, *, task: str, op: str | None, seed: int) -> Done:
        """Read the task and prepare the reference's calls, once."""
        if self.references:
            return Done()
        self.task = Task(task, self.device, seed, op)
        assert self.task.op is not None
        for one, other in zip(self.task.hidden(0), self.task.hidden(0), strict=True):
            if not all(torch.equal(*pair) for pair in storages(one.values, other.values)):
                raise DeclarationError(
                    f"{self.task.name}: samples() returned different values for the same seed. "
                    "Draw random values with torch's generator"
                )

        self.schema = self.task.op.schema
        self.new_results = len(c_names(self.schema)) - len(self.schema.arguments)
        results = self.task.results(self.task.timed.sample)
        self.spec = protocol.specs(results)
        self.within = tolerances(self.task.timed.sample, results)
        for number in range(_BURSTS):
            calls = self._calls(number)
            burst = Burst.of(self.task.reference, calls, self.spec, self.device)
            self.references.append(burst)
        return Done()

    def _calls(self, seed: int) -> list[Any]:
        return [call.values for call in self.task.burst(seed, _CALLS)]

    def compile(self, *, text: str) -> Done:
        """Compile and load device code."""
        self._forget()
        arch = wanted.here(backends.for_device("cuda")).arch
        compiled = launch.compile_text(text, self.schema.text, arch)
        compiled.load()
        self.kernel = compiled
        usage = {"registers": compiled.registers, "spills": compiled.spills}
        return Done({**usage, "isolation": ["no host code"]})

    def check(self, *, seed: int) -> Done:
        """Make each hidden call twice and compare the results, then prepare the timed calls."""
        batches = [self._call_twice(sample) for sample in self.task.hidden(seed)]
        differences = []
        calls = []
        for batch, sample in zip(batches, self.task.hidden(seed), strict=True):
            if batch is not None:
                for one, other in zip(*batch.results, strict=True):
                    differences.append(referee.differ(one, other, _EXACT))
                results = self.task.results(sample)
                call = Expected(sample, results, tolerances(sample, results))
                calls.append((batch, [call] * 2))
        self.max_error = self._compared(calls)

        self.batches = [self._bind(self._calls(number), self.spec) for number in range(_BURSTS)]
        self.bursts = [
            Burst(each.functions, each.inputs, self.spec, self.device) for each in self.batches
        ]
        return Done({"nondeterministic": bool(torch.stack(differences).any())})

    def measure(self, *, seed: int) -> Done:
        """Time the bursts of the candidate and of the reference in turns."""
        self.times = list[float]()
        self.reference_times = list[float]()
        for number, batch in enumerate(self.batches):
            # No kernel has seen these values.
            for memory, values in storages(batch.inputs, self._calls(seed + 1 + number)):
                memory.copy_(values)
            batch.clear()
            self.reference_times.append(self.references[number].seconds_of_call())
            self.times.append(self.bursts[number].seconds_of_call())
        return Done({})

    def compare(self, *, seed: int) -> Done:
        """Compare the results of all timed calls. Only then, tell their times."""
        calls = []
        for number, batch in enumerate(self.batches):
            samples = self.task.burst(seed + 1 + number, _CALLS)
            expected = [Expected(each, self.task.results(each), self.within) for each in samples]
            calls.append((batch, expected))
        error = max(self.max_error, self._compared(calls))
        self._forget()
        timed = {"times": self.times, "references": self.reference_times}
        return Done({**timed, "max_error": error})

    def _call_twice(self, sample: Sample) -> PreparedCalls | None:
        """Call with a sample's tensors in other memory. Returns None if the reference refuses the sample.

        The results' dtypes and shapes come from other values, so that the device's memory never
        holds an expected result.
        """
        try:
            spec = protocol.specs(self.task.results(sample.map(torch.zeros_like)))
        except Exception:
            return None
        batch = self._bind([sample.map(replica).values for _ in range(2)], spec)
        for function in batch.functions:
            function()
        return batch

    def _bind(self, inputs: list[Any], spec: Sequence[TensorSpec]) -> PreparedCalls:
        """Prepare calls. The arguments that they write are also results."""
        assert self.kernel is not None
        batch = PreparedCalls(self.kernel, inputs, spec[: self.new_results], self.device)
        if self.task.mutates:
            for results, values in zip(batch.results, inputs, strict=True):
                results += tensors_of(values)
        return batch

    def _forget(self) -> None:
        """Free what belongs to the last candidate."""
        self.batches = []
        self.bursts = []
        if self.kernel is not None:
            self.kernel.unload()
            self.kernel = None

    def _compared(self, calls: list[tuple[PreparedCalls, list[Expected]]]) -> float:
        """Compare inputs, results and guards with the expected ones, and wait for the device only once.

        Returns the largest difference. Raises VerdictReached.
        """
        doubts = []
        errors = [torch.zeros((), dtype=torch.float64, device=self.device)]
        for batch, expected in calls:
            for got, call in zip(batch.results, expected, strict=True):
                for one, right, within in zip(got, call.results, call.within, strict=True):
                    doubts.append(referee.differ(one, right, within))
                    errors.append(referee.max_difference(one, right))
            doubts.append(self._out_of_bounds_write(batch, expected))
        if torch.stack(doubts).any():
            self._find_mistake(calls)
        return float(torch.stack(errors).max())

    def _out_of_bounds_write(self, batch: PreparedCalls, expected: list[Expected]) -> torch.Tensor:
        """Return whether calls wrote to their inputs, or outside their results."""
        found = [batch.overrun()]
        if not self.task.mutates:
            drawn = [call.sample.values for call in expected]
            for memory, values in storages(batch.inputs, drawn):
                found.append(referee.differ(memory, values, _EXACT))
        return torch.stack(found).any()

    def _find_mistake(self, calls: list[tuple[PreparedCalls, list[Expected]]]) -> None:
        """Raise VerdictReached for the first wrong call, in words. NaN is right if it is expected."""
        for batch, expected in calls:
            wrote_outside = bool(self._out_of_bounds_write(batch, expected))
            pairs = zip(batch.results, expected, strict=True)
            for index, (results, call) in enumerate(pairs):
                found = referee.compare(
                    results, call, (other.results for other in expected[:index])
                )
                if found is None and wrote_outside:
                    found = "wrong", "writes to its inputs, or outside its results"
                if found is not None:
                    facts = {
                        "max_error": referee.max_error(results, call.results),
                        "sample": str(call.sample),
                        "tolerance": [*call.within[0]],
                    }
                    raise VerdictReached(*found, not wrote_outside, facts)

"""What candidates are judged by: an op's folder or a KernelBench file, its calls with hidden values, and the reference's results."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit.declare import arguments
from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.errors import BadSetting, DeclarationError
from opjit.judge.operators import Recorder
from opjit.judge.wire import saved
from opjit.testing.compare import as_list, tolerance
from opjit.testing.samples import SMALL, replica, resized

_MOST_SAMPLES = 24
_LARGEST_SAMPLE = 4 << 20  # elements
_TIMED = 1 << 20  # bytes of a call that is timed, at most, if the task has such a one; on CUDA 64 times that
_POOL = 192 << 20  # bytes of all timed calls
_BURST = 0.01  # seconds
ROUNDS = 9  # bursts of a candidate at most, the one to warm up included
_SIZES = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100)


class Expected(NamedTuple):
    """A call, the reference's results on the CPU and, of tensors of floats, by how much each element may differ."""

    sample: Sample
    results: list[Any]
    allowed: Sequence[torch.Tensor | None] = ()

    @classmethod
    def of(cls, sample: Sample, results: list[Any]) -> Expected:
        def allowed(result: Any) -> torch.Tensor | None:
            within = tolerance(result, sample) if isinstance(result, torch.Tensor) else (0, 0)
            return within[1] + within[0] * result.abs() if any(within) else None

        return cls(sample, [_moved(each, "cpu") for each in results], [_moved(allowed(each), "cpu") for each in results])


class Burst(NamedTuple):
    """Calls with their results, and a file of memory with their arguments."""

    calls: list[Expected]
    descriptor: int


class Task:
    """What candidates are judged by.

    Args:
        where: the path of an op's folder, an op's name, or the path of a KernelBench file.
        op: which op of a folder that declares several.
        seed: decides the hidden values.

    Raises:
        DeclarationError, UnknownOp: there is no op, reference or sample.
        BadSetting: the folder declares several ops, and `op` names none of them.
    """

    def __init__(self, where: str, device: str, seed: int, op: str | None = None) -> None:
        self.device, self.seed = device, seed
        self._draw = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.op: Op | None = None
        self.text = ""
        self.init: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        if where.endswith(".py") and Path(where).name != "op.py":
            self._read_kernelbench(Path(where))
        else:
            self.op = _chosen(where.removesuffix("op.py") or ".", op)
            self.name = self.op.qualified
            self.reference: Callable[..., Any] = self.op.reference_function
        self.mutates = self.op is not None and self.op.schema.mutates
        self.samples = sorted(self._expected(self._hidden()), key=lambda call: -call.sample.numel)  # large ones show best what is wrong
        if not self.samples:
            raise DeclarationError(f"{self.name} has no sample on {device}; add some to its op.py")
        self.timed = self._timed()
        self.operators = self._operators()

    def _read_kernelbench(self, path: Path) -> None:
        from opjit.judge.child import run_file

        module = run_file(path)
        missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if not hasattr(module, name)]
        if missing:
            raise DeclarationError(f"{path} defines no {', '.join(missing)}; a task is an op's folder, or a file with Model, "
                                   "get_inputs and get_init_inputs")
        self.name, self.text = path.stem, path.read_text("utf-8")
        given = module.get_init_inputs()
        self.init = ((), given) if isinstance(given, dict) else (tuple(given), {})
        torch.manual_seed(self.seed)
        self.reference = module.Model(*self.init[0], **self.init[1]).to(self.device).eval()
        self._inputs = module.get_inputs

    # --- calls ---

    def _hidden(self) -> Iterator[Sample]:
        """Yield the task's calls: as declared, with other values, and with other sizes."""
        torch.manual_seed(self.seed)
        if self.op is None:
            for _ in range(5):
                yield self._varied(Sample(tuple(_moved(each, self.device) for each in self._inputs())))
            return
        declared = [each for each in self.op.samples_on(self.device) if each.numel <= _LARGEST_SAMPLE]
        kinds = {each.kind: number for number, each in enumerate(declared)}
        order = sorted(range(len(declared)), key=lambda number: number not in kinds.values())[:_MOST_SAMPLES]
        yield from (declared[number] for number in sorted(order))
        small = [declared[number] for number in order if declared[number].numel <= SMALL]
        for sample in self._draw.sample(small, min(8, len(small))):
            yield self._varied(sample)
            other = resized(sample, self._draw.sample(_SIZES, 4))
            if other is not None and "sizes" not in self.op.waived:
                yield self._varied(other)

    def _varied(self, sample: Sample) -> Sample:
        """The same call with other numbers: floats a little larger or smaller; if there are none, integers in another order."""
        floating = any(t.is_floating_point() or t.is_complex() for t in sample.tensors())

        def change(t: torch.Tensor) -> torch.Tensor:
            own = replica(t)
            memory = torch.empty(0, dtype=t.dtype, device=t.device).set_(own.untyped_storage())  # elements may share it
            if t.is_floating_point() or t.is_complex():
                factors = 0.75 + 0.5 * torch.rand(memory.shape, generator=self._generator, dtype=torch.float64).to(t.device)
                memory.copy_(memory.to(torch.complex128 if t.is_complex() else torch.float64) * factors)
            elif not floating:
                memory.copy_(memory[torch.randperm(memory.numel(), generator=self._generator).to(t.device)])
            return own

        return sample.map(change)

    def _expected(self, samples: Iterator[Sample]) -> Iterator[Expected]:
        for sample in samples:
            try:
                yield Expected.of(sample, self.results(sample))
            except Exception:  # a size that the reference refuses
                continue

    def results(self, sample: Sample) -> list[Any]:
        """The reference's results, and the arguments that it writes."""
        own = sample.map(replica)
        with torch.inference_mode():
            return [*as_list(self.reference(*own.args, **own.kwargs)), *(own.tensors() if self.mutates else [])]

    def _operators(self) -> list[str]:
        own = self.samples[0].sample.map(replica)
        with torch.no_grad(), Recorder() as recorder:
            self.reference(*own.args, **own.kwargs)
        return sorted(recorder.names)

    # --- timed calls ---

    def _timed(self) -> tuple[Sample, int, int]:
        """The call that is timed, with the fewest bytes and operations that it takes; 0 if nobody says."""
        if self.op is not None and self.op._workloads is not None:
            found, most = [], _TIMED << 6 * (self.device != "cpu")
            for each in self.op.workloads_on(self.device):
                found.append((Sample(each.args, each.kwargs), each.bytes, each.flops))
                if _size(found[-1][0]) > most:
                    break  # the next may fill the memory
            return found[-2] if len(found) > 1 and _size(found[-1][0]) > most else found[-1]
        return max((each.sample for each in self.samples), key=_size), 0, 0

    def bursts(self) -> list[Burst]:
        """Calls to time, each with values of its own; no child sees one twice."""
        sample, *_ = self.timed
        each = _size(sample) + sum(t.nbytes for t in tensors_of(self.results(sample)))
        self._wait()
        started = time.perf_counter()
        for _ in range(3):
            self.results(sample)
        self._wait()
        seconds = (time.perf_counter() - started) / 3
        count = max(2, min(128, int(_BURST / max(seconds, 1e-7)), _POOL // (ROUNDS * max(1, each))))
        return [self._burst(sample, count) for _ in range(ROUNDS)]

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def _burst(self, sample: Sample, count: int) -> Burst:
        calls = [Expected.of(one, self.results(one)) for one in (self._varied(sample) for _ in range(count))]
        return Burst(calls, saved([call.sample.values for call in calls]))


def _chosen(where: str, name: str | None) -> Op:
    """The op of a folder that has one, or the named one."""
    text = where if "/" in where or not Path(where, "op.py").is_file() else f"./{where}"
    ops = arguments.ops(text)
    found = [op for op in ops if name in (None, op.qualified, op.schema.name)]
    if len(found) != 1:
        raise BadSetting(f"{where} declares {', '.join(op.qualified for op in ops)}; name one of them with --op")
    return found[0]


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _size(sample: Sample) -> int:
    return sum(t.nbytes for t in sample.tensors())

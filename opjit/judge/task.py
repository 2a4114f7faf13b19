"""What candidates are judged by: an op's folder or a KernelBench file, its calls with hidden values, and the reference's results."""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opjit import testing
from opjit.declare import arguments
from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.errors import BadSetting, DeclarationError
from opjit.measure.timing import wait
from opjit.testing.compare import Tolerance, as_list, tolerance
from opjit.testing.samples import SMALL, moved, replica, resized

ROUNDS = 9  # bursts of a candidate at most, the one to warm up included
_MOST_SAMPLES = 24
_LARGEST_SAMPLE = 4 << 20  # elements
_TIMED = (
    1 << 20
)  # bytes of a call that is timed, at most, if the task has such a one; on CUDA 64 times that
_POOL = 192 << 20  # bytes of all timed calls
_BURST = 0.01  # seconds
_MOST_CALLS = 128  # of a burst
_ALIGNMENT = 512  # bytes, as torch's allocator gives
_SIZES = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100)

# Operators that make, move or view tensors, and compute nothing.
_FREE = frozenset(
    [
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "clone",
        "copy",
        "copy_",
        "_to_copy",
        "to",
        "set_",
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "detach",
        "alias",
        "as_strided",
        "unbind",
        "split",
        "cat",
        "stack",
        "contiguous",
        "item",
        "_local_scalar_dense",
        "resize_",
        "fill_",
        "zero_",
        "arange",
        "scalar_tensor",
        "lift_fresh",
    ]
)


class Expected(NamedTuple):
    """A call, the reference's results, and the largest difference of each result that counts as rounding."""

    sample: Sample
    results: list[Any]
    within: Sequence[Tolerance] = ()

    @classmethod
    def of(cls, sample: Sample, results: list[Any]) -> "Expected":
        """Keep results on the CPU."""
        return cls(sample, [on(each, "cpu") for each in results], tolerances(sample, results))


class Recorder(TorchDispatchMode):
    """Notes the names of torch's operators that compute in its block: a candidate that calls those of the reference has no own kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "aten" and name not in _FREE:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


class TimedSample(NamedTuple):
    """The call that is timed, the fewest bytes and operations that it takes (0 if nobody says), and how many calls a burst has."""

    sample: Sample
    bytes: int
    flops: int
    calls: int


class Task:
    """What candidates are judged by: an op's folder or name, or a KernelBench file; the seed decides the hidden values.
    Raises DeclarationError or UnknownOp without op, reference or sample, and BadSetting where `op` does not name one of several."""

    def __init__(self, where: str, device: str, seed: int, op: str | None = None) -> None:
        self.device, self.seed = device, seed
        self.op: Op | None = None
        self.init: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        if where.endswith(".py") and Path(where).name != "op.py":
            self._read_kernelbench(Path(where))
        else:
            self.op = testing.refuse_unknown_waivers(
                _chosen(where.removesuffix("op.py") or ".", op)
            )
            self.name = self.op.qualified
            self.reference: Callable[..., Any] = self.op.reference_function
        self.mutates = self.op is not None and self.op.schema.mutates
        if next(self._expected(), None) is None:
            raise DeclarationError(f"{self.name} has no sample on {device}; add some to its op.py")

    def _read_kernelbench(self, path: Path) -> None:
        module = run_file(path)
        missing = [
            name for name in ("Model", "get_inputs", "get_init_inputs") if not hasattr(module, name)
        ]
        if missing:
            raise DeclarationError(
                f"{path} defines no {', '.join(missing)}; a task is an op's folder, or a file with Model, "
                "get_inputs and get_init_inputs"
            )
        self.name = path.stem
        given = module.get_init_inputs()
        self.init = ((), given) if isinstance(given, dict) else (tuple(given), {})
        torch.manual_seed(self.seed)
        self.reference = module.Model(*self.init[0], **self.init[1]).to(self.device).eval()
        self._inputs = module.get_inputs

    @cached_property
    def samples(self) -> list[Expected]:
        """The hidden calls, with results on the CPU; the largest first, as they show best what is wrong."""
        return sorted(self._expected(), key=lambda call: -call.sample.numel)

    @cached_property
    def operators(self) -> list[str]:
        """The names of torch's own operators that the reference calls."""
        own = self.samples[0].sample.map(replica)
        with torch.no_grad(), Recorder() as recorder:
            self.reference(*own.args, **own.kwargs)
        return sorted(recorder.names)

    def _expected(self) -> Iterator[Expected]:
        """Yield hidden calls with the reference's results, but those of sizes that it refuses, or that the op's declaration does."""
        for sample in self.hidden(self.seed):
            with suppress(Exception):
                results = self.results(sample)
                if self._declares(sample, results):
                    yield Expected.of(sample, results)

    def _declares(self, sample: Sample, results: list[Any]) -> bool:
        """Return whether results have the shapes that the op declares: a reference may broadcast sizes that no kernel takes."""
        if self.op is None:
            return True
        meta = sample.map(lambda t: t.to("meta"))
        try:
            declared = tensors_of(as_list(self.op.fake(*meta.args, **meta.kwargs)))
        except (RuntimeError, NotImplementedError):  # a shape depends on elements
            return True
        return all(
            one.shape == other.shape
            for one, other in zip(declared, tensors_of(results), strict=False)
        )

    def results(self, sample: Sample) -> list[Any]:
        """What the reference returns, and the arguments that it writes."""
        own = sample.map(replica)
        with torch.inference_mode():
            return [
                *as_list(self.reference(*own.args, **own.kwargs)),
                *(own.tensors() if self.mutates else []),
            ]

    def hidden(self, seed: int) -> Iterator[Sample]:
        """Yield the task's calls: as declared, with other values, and with other sizes. A seed draws the same ones again."""
        torch.manual_seed(seed)
        draw, generator = random.Random(seed), torch.Generator(self.device).manual_seed(seed)
        if self.op is None:
            for _ in range(5):
                yield from _varied(
                    Sample(tuple(on(each, self.device) for each in self._inputs())), generator
                )
            return
        declared = [
            each for each in self.op.samples_on(self.device) if each.numel <= _LARGEST_SAMPLE
        ]
        kinds = {each.kind: number for number, each in enumerate(declared)}
        order = sorted(range(len(declared)), key=lambda number: number not in kinds.values())[
            :_MOST_SAMPLES
        ]
        yield from (declared[number] for number in sorted(order))
        small = [declared[number] for number in order if declared[number].numel <= SMALL]
        for sample in draw.sample(small, min(8, len(small))):
            yield from _varied(sample, generator)
            other = resized(sample, draw.sample(_SIZES, 4))
            if other is not None and "shapes" not in self.op.declaration.waived:
                yield from _varied(other, generator)

    def burst(self, seed: int, most: int = _MOST_CALLS) -> list[Sample]:
        """Calls to time, each with values of its own."""
        return _varied(
            self.timed.sample,
            torch.Generator(self.device).manual_seed(seed),
            min(most, self.timed.calls),
        )

    @cached_property
    def timed(self) -> TimedSample:
        sample, moved, flops = self._chosen_workload()
        each = _size(sample) + sum(t.nbytes for t in tensors_of(self.results(sample)))
        wait(self.device)
        seconds = math.inf
        for _ in range(3):  # the quickest: a busy machine holds up any one of them
            started = time.perf_counter()
            self.results(sample)
            wait(self.device)
            seconds = min(seconds, time.perf_counter() - started)
        calls = min(_MOST_CALLS, int(_BURST / max(seconds, 1e-7)), _POOL // (ROUNDS * max(1, each)))
        return TimedSample(sample, moved, flops, max(2, calls))

    def _chosen_workload(self) -> tuple[Sample, int, int]:
        if self.op is not None and self.op.declaration.workloads is not None:
            found, most = [], _TIMED << 6 * (self.device != "cpu")
            for each in self.op.workloads_on(self.device):
                found.append((Sample(each.args, each.kwargs), each.bytes, each.flops))
                if _size(found[-1][0]) > most:
                    break  # the next may fill the memory
            return found[-2] if len(found) > 1 and _size(found[-1][0]) > most else found[-1]
        return max(self.hidden(self.seed), key=_size), 0, 0


def run_file(path: Path) -> Any:
    """Run a file of Python as a module of its own."""
    module = sys.modules["opjit_judged"] = ModuleType("opjit_judged")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return module


def tolerances(sample: Sample, results: Sequence[Any]) -> list[Tolerance]:
    """The largest difference of each result that counts as rounding."""
    return [
        tolerance(each, sample) if isinstance(each, torch.Tensor) else Tolerance(0, 0)
        for each in results
    ]


def _varied(sample: Sample, generator: torch.Generator, count: int = 1) -> list[Sample]:
    """The same call with other numbers, so many times: floats a little larger or smaller; if there are none, integers in another order.
    Copies of a tensor lie in one storage, so that drawing them takes a few calls of torch."""
    floating = any(t.is_floating_point() or t.is_complex() for t in sample.tensors())

    def change(t: torch.Tensor) -> Callable[[int], torch.Tensor]:
        memory = torch.empty(0, dtype=t.dtype, device=t.device).set_(
            t.untyped_storage()
        )  # elements may share it
        rows = memory.expand(count, -1)
        if t.is_floating_point() or t.is_complex():
            factors = 0.75 + 0.5 * torch.rand(
                rows.shape, generator=generator, dtype=torch.float64, device=generator.device
            )
            rows = (rows.to(torch.complex128 if t.is_complex() else torch.float64) * factors).to(
                t.dtype
            )
        elif not floating:
            rows = memory[
                torch.rand(rows.shape, generator=generator, device=generator.device).argsort()
            ]
        pitch = -(-len(memory) * t.element_size() // _ALIGNMENT) * _ALIGNMENT // t.element_size()
        own = t.new_zeros(count, pitch)
        own[:, : len(memory)] = rows
        return lambda number: moved(t, own, number * pitch + int(t.storage_offset()))

    drawn = [change(t) for t in sample.tensors()]

    def copy(number: int) -> Sample:
        rows = iter(drawn)
        return sample.map(lambda _: next(rows)(number))

    return [copy(number) for number in range(count)]


def _chosen(where: str, name: str | None) -> Op:
    """The op of a folder that has one, or the named one."""
    text = where if "/" in where or not Path(where, "op.py").is_file() else f"./{where}"
    ops = arguments.ops(text)
    found = [op for op in ops if name in (None, op.qualified, op.schema.name)]
    if len(found) != 1:
        raise BadSetting(
            f"{where} declares {', '.join(op.qualified for op in ops)}; name one of them with --op"
        )
    return found[0]


def on(value: Any, device: str) -> Any:
    """A tensor on a device; any other value as it is."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _size(sample: Sample) -> int:
    return sum(t.nbytes for t in sample.tensors())

"""Tasks: an op's folder or a KernelBench file, its calls with hidden values, and the reference's results."""

import math
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from opjit import files, testing
from opjit.catalog import arguments
from opjit.declare.sample import Sample
from opjit.errors import BadSetting, DeclarationError, ToolMissing
from opjit.judge.operators import Recorder, families, largest
from opjit.measure.plan import Arguments
from opjit.measure.timing import wait
from opjit.operators.op import Op
from opjit.tensors import bytes_of, moved, replica, tensors_of
from opjit.testing.compare import Tolerance, as_list, tolerance
from opjit.testing.samples import SMALL, resized

BURSTS = 13  # of a candidate at most: without calls, with a log, and to time
_MOST_SAMPLES = 24
_LARGEST_SAMPLE = 4 << 20  # elements
# Bytes of a timed call at most, if a workload is that small. On CUDA, 64 times that.
_TIMED = 1 << 20
_POOL = 192 << 20  # bytes of all timed calls
_BURST = 0.01  # seconds
_MOST_CALLS = 128  # of a burst
_ALIGNMENT = 512  # bytes, like torch's allocator
_CALLS_OF_MODEL = 5
_SIZES = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100)


class Expected(NamedTuple):
    """A call, the reference's results, and the largest difference of each result that counts as rounding."""

    sample: Sample
    results: list[Any]
    within: Sequence[Tolerance] = ()

    @classmethod
    def of(cls, sample: Sample, results: list[Any]) -> "Expected":
        """Keep results on the CPU."""
        on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, results)
        return cls(sample, on_cpu, tolerances(sample, results))


class TimedSample(NamedTuple):
    """The call that is timed.

    `bytes` and `flops` are the fewest that it needs, or 0 if they are unknown. `calls` is the length of a burst.
    """

    sample: Sample
    bytes: int
    flops: int
    calls: int


class Task:
    """An op or a KernelBench file, its calls with hidden values, and the reference's results.

    Args:
        where: an op's folder or name, or the path of a KernelBench file.
        device: ``"cpu"`` or ``"cuda"``.
        seed: decides the hidden values.
        op: which op of a folder that declares several.

    Raises:
        DeclarationError: there is no reference or sample, or another user can change the files.
        UnknownOp: the op does not exist.
        BadSetting: `op` does not name one of several.
    """

    def __init__(self, where: str, device: str, seed: int, op: str | None = None) -> None:
        self.device = device
        self.seed = seed
        self.op: Op | None = None
        self.init: Arguments = (), {}
        self._inputs: Callable[[], Iterable[list[Any]]]
        self.imports = ""  # a directory with modules that candidates may import
        self.mutates = False
        path = Path(where)
        readers = {".yml": self._read_gpu_mode, ".py": self._read_kernelbench}
        if path.suffix in readers and path.name != "op.py":
            problem = files.replacement_risk(path.absolute())
            if problem is not None:
                raise DeclarationError(f"refusing to run {path}: {problem}")
            readers[path.suffix](path)
        else:
            chosen = _choose_op(where.removesuffix("op.py") or ".", op)
            self.op = testing.refuse_unknown_waivers(chosen)
            self.name = self.op.qualified
            self.reference: Callable[..., Any] = self.op.reference_function
            self.mutates = self.op.schema.mutates
        if next(self._expected(), None) is None:
            raise DeclarationError(
                f"{self.name} does not have a sample on {device}. Add some to its op.py"
            )

    def _read_gpu_mode(self, path: Path) -> None:
        """Read a task.yml of GPU MODE: it lists files, and the arguments of generate_input in reference.py."""
        try:
            import yaml  # type: ignore[import-untyped]
        except ImportError as error:
            raise ToolMissing("yaml", f"{path} needs PyYAML: pip install pyyaml") from error
        document = yaml.safe_load(path.read_text("utf-8"))
        folder = files.temporary_folder("opjit-task-")
        for each in document["files"]:
            source = path.parent / each["source"]
            if source.is_file():  # the submission is not
                shutil.copy(source, folder / each["name"])
        sys.path.insert(0, str(folder))
        module = run_file(folder / "reference.py")
        self.imports = str(folder)
        self.mutates = True
        self.name = path.absolute().parent.name
        self.reference = module.ref_kernel
        calls = [*document["tests"], *document.get("benchmarks", ())]
        self._inputs = lambda: ([module.generate_input(**call)] for call in calls)

    def _read_kernelbench(self, path: Path) -> None:
        module = run_file(path)
        needed = ("Model", "get_inputs", "get_init_inputs")
        missing = [name for name in needed if not hasattr(module, name)]
        if missing:
            raise DeclarationError(
                f"{path} does not define {', '.join(missing)}. Expected an op's directory, or a file with Model, "
                "get_inputs and get_init_inputs"
            )
        self.name = path.stem
        given = module.get_init_inputs()
        self.init = ((), given) if isinstance(given, dict) else (tuple(given), {})
        torch.manual_seed(self.seed)
        args, kwargs = self.init
        self.reference = module.Model(*args, **kwargs).to(self.device).eval()
        self._inputs = lambda: (module.get_inputs() for _ in range(_CALLS_OF_MODEL))

    @cached_property
    def samples(self) -> list[Expected]:
        """The hidden calls with results on the CPU, the largest first, because they show mistakes best."""
        return sorted(self._expected(), key=lambda call: -call.sample.numel)

    @cached_property
    def operators(self) -> set[str]:
        """The families of torch's operators that the reference calls with large tensors."""
        first = self.samples[0].sample
        elements = Counter[str]()
        with Recorder(elements):
            self.results(first)
        return families(elements, largest(first.values) // 4)

    def _expected(self) -> Iterator[Expected]:
        """Yield hidden calls with the reference's results, without sizes that it or the op's declaration refuses."""
        for sample in self.hidden(self.seed):
            with suppress(Exception):
                results = self.results(sample)
                if self._declares(sample, results):
                    yield Expected.of(sample, results)

    def _declares(self, sample: Sample, results: list[Any]) -> bool:
        """Return whether results have the shapes that the op declares: a reference may broadcast other sizes."""
        if self.op is None:
            return True
        meta = sample.map(lambda t: t.to("meta"))
        try:
            declared = tensors_of(as_list(self.op.fake(*meta.args, **meta.kwargs)))
        except (RuntimeError, NotImplementedError):  # a shape depends on elements
            return True
        pairs = zip(declared, tensors_of(results), strict=False)
        return all(one.shape == other.shape for one, other in pairs)

    def results(self, sample: Sample) -> list[Any]:
        """Return the reference's results, and the arguments that it writes."""
        copied = sample.map(replica)
        with torch.inference_mode():
            results = as_list(self.reference(*copied.args, **copied.kwargs))
        written = copied.tensors() if self.mutates else []
        return [*results, *written]

    def hidden(self, seed: int) -> Iterator[Sample]:
        """Yield the task's calls: as declared, with other values, and with other sizes. A seed draws the same ones again."""
        torch.manual_seed(seed)
        draw = random.Random(seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        if self.op is None:
            for inputs in self._inputs():
                sample = Sample(tuple(inputs)).map(lambda t: t.to(self.device))
                yield from _perturbed(sample, generator)
            return

        declared = [
            each for each in self.op.samples_on(self.device) if each.numel <= _LARGEST_SAMPLE
        ]
        last = {each.kind: id(each) for each in declared}.values()
        declared.sort(key=lambda each: id(each) not in last)  # the last of each kind comes first
        chosen = declared[:_MOST_SAMPLES]
        yield from chosen

        small = [each for each in chosen if each.numel <= SMALL]
        for sample in draw.sample(small, min(8, len(small))):
            yield from _perturbed(sample, generator)
            other = resized(sample, draw.sample(_SIZES, 4))
            if other is not None and "shapes" not in self.op.declaration.waived:
                yield from _perturbed(other, generator)

    def burst(self, seed: int, limit: int = _MOST_CALLS) -> list[Sample]:
        """Return calls to time, with different values in each."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return _perturbed(self.timed.sample, generator, min(limit, self.timed.calls))

    @cached_property
    def timed(self) -> TimedSample:
        sample, moved, flops = self._choose_workload()
        results = self.results(sample)
        size = bytes_of([sample.values, results])
        wait(self.device)
        seconds = math.inf
        for _ in range(3):  # the quickest, because a busy machine delays some
            started = time.perf_counter()
            self.results(sample)
            wait(self.device)
            seconds = min(seconds, time.perf_counter() - started)
        by_time = int(_BURST / max(seconds, 1e-7))
        by_memory = _POOL // (BURSTS * max(1, size))
        return TimedSample(sample, moved, flops, max(2, min(_MOST_CALLS, by_time, by_memory)))

    def _choose_workload(self) -> tuple[Sample, int, int]:
        """Return the largest workload below the limit, or the largest call, with its bytes and operations."""
        if self.op is None or self.op.declaration.workloads is None:
            return max(self.hidden(self.seed), key=lambda each: bytes_of(each.values)), 0, 0

        limit = _TIMED if self.device == "cpu" else 64 * _TIMED
        chosen: tuple[Sample, int, int] | None = None
        for each in self.op.workloads_on(self.device):
            sample = Sample(each.args, each.kwargs)
            if chosen is not None and bytes_of(sample.values) > limit:
                break  # the next may fill the memory
            chosen = sample, each.bytes, each.flops
        assert chosen is not None
        return chosen


def run_file(path: Path) -> Any:
    """Run a Python file as a module."""
    module = sys.modules["opjit_judged"] = ModuleType("opjit_judged")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return module


def tolerances(sample: Sample, results: Sequence[Any]) -> list[Tolerance]:
    """Return the largest difference of each result that counts as rounding."""
    return [
        tolerance(each, sample) if isinstance(each, torch.Tensor) else Tolerance(0, 0)
        for each in results
    ]


def _perturbed(sample: Sample, generator: torch.Generator, count: int = 1) -> list[Sample]:
    """Return the same call with other numbers, so many times.

    Floats become a little larger or smaller. Without floats, integers get another order. Copies of
    a tensor share a storage, so that drawing them costs few calls of torch.
    """
    has_floats = any(t.is_floating_point() or t.is_complex() for t in sample.tensors())

    def draw(t: torch.Tensor) -> Callable[[int], torch.Tensor]:
        # Elements may share memory.
        memory = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
        rows = memory.expand(count, -1)
        if t.is_floating_point() or t.is_complex():
            wide = torch.complex128 if t.is_complex() else torch.float64
            random_numbers = torch.rand(
                rows.shape, generator=generator, dtype=torch.float64, device=generator.device
            )
            rows = (rows.to(wide) * (0.75 + 0.5 * random_numbers)).to(t.dtype)
        elif not has_floats:
            keys = torch.rand(rows.shape, generator=generator, device=generator.device)
            rows = memory[keys.argsort()]

        size = t.element_size()
        pitch = -(-len(memory) * size // _ALIGNMENT) * _ALIGNMENT // size
        copies = t.new_zeros(count, pitch)
        copies[:, : len(memory)] = rows
        return lambda number: moved(t, copies, number * pitch + int(t.storage_offset()))

    drawn = [draw(t) for t in sample.tensors()]

    def copy(number: int) -> Sample:
        remaining = iter(drawn)
        return sample.map(lambda _: next(remaining)(number))

    return [copy(number) for number in range(count)]


def _choose_op(where: str, name: str | None) -> Op:
    """Return the op of a folder that has one, or the named one."""
    text = where if "/" in where or not Path(where, "op.py").is_file() else f"./{where}"
    ops = arguments.ops(text)
    found = [op for op in ops if name in (None, op.qualified, op.schema.name)]
    if len(found) != 1:
        declared = ", ".join(op.qualified for op in ops)
        raise BadSetting(f"{where} declares {declared}. Name one of them with --op")
    return found[0]

"""A candidate's process: builds it, gives up rights, and calls it with the tensors that the judge sends."""

import ctypes
import gc
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opjit import api, backends, cpp_extension, loader, request
from opjit.builder import build
from opjit.declare.sample import tensors_of
from opjit.emulate import build as emulation
from opjit.errors import DeclarationError
from opjit.judge import operators, protocol, sandbox, screen
from opjit.judge.audit import Watch
from opjit.judge.burst import Burst, changed, fill_with_sentinel
from opjit.judge.protocol import Called, Ran, Results, describe_result
from opjit.judge.task import run_file
from opjit.judge.verdict import VerdictReached
from opjit.live import inline, reload
from opjit.measure.timing import wait
from opjit.operators.op import Op
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root, default_store
from opjit.testing.compare import as_list
from opjit.wanted import OpRequest, target_of
from opjit.wanted import describe as describe_recipe

_M_PERTURB = -6
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
# Of ops: all of its entries in the cache passed the check of their object files.
_NAMESPACE = "candidate"
_REPLACEABLE = """
    time torch torch.cuda torch.testing torch.nn.functional builtins os json socket
    opjit.judge.protocol opjit.judge.burst opjit.judge.operators
"""


def import_all() -> None:
    """Import what workers need, once for all of them."""
    # A process that initializes CUDA cannot fork workers that use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    api.declare_all()
    request.import_builder()
    with operators.Recorder():
        data = protocol.read_sealed(protocol.serialize([torch.ones(1)]), protocol.MESSAGE_LIMIT)
        protocol.deserialize(data, "cpu").pop().add(1)
    gc.freeze()  # workers share it


class CandidateBinary(OpRequest):
    """A candidate's library. It is stored only if its object files pass the check."""

    def build(self, store: Store) -> Entry:
        on_gpu = self.target.backend.uses_nvcc
        self.op.write_code()
        recipe = self.now(store).inputs
        return build.build(recipe, store, inspect=lambda work: screen.check_objects(work, on_gpu))


@dataclass(eq=False)
class CandidateWorker:
    """Answers the judge's requests about one candidate."""

    folder: Path
    device: str
    isolation: list[str]

    def __post_init__(self) -> None:
        self.call: Callable[..., Any] = lambda *args, **kwargs: None
        self.mutates = False
        self.op: Op | None = None
        self.entry: Entry | None = None
        self.emulated: Path | None = None  # the library of a CUDA candidate on the CPU
        self.watch: Watch | None = None
        self.functions: dict[str, Any] = {}
        self._probe = torch.arange(1, dtype=torch.int64)

        warnings.simplefilter("ignore")  # to show one, Python reads files
        with suppress(Exception):  # the first use of the device gives the reason
            # Starts the threads and contexts that torch needs.
            torch.ones(1 << 17, device=self.device).exp().sum().item()
        _fill_memory(False)

    def answer(
        self, asked: protocol.Request, data: list[bytearray]
    ) -> tuple[Any, bytearray | None]:
        """Carry out a request. Returns the answer and bytes to send with it."""
        match asked:
            case protocol.Build():
                return self._build(asked), None
            case protocol.Load():
                return self._load(asked), None
            case protocol.LoadModel():
                return self._load_model(asked, data[0]), None
            case protocol.CallTwice():
                return self._call(asked, data[0])
            case protocol.Prepare():
                return self._prepare(asked, data[0]), None
            case protocol.Arm():
                self.burst.arm()
                return protocol.Done(), None
            case protocol.Run():
                return self._run(asked), None
            case protocol.Probe():
                return Ran(((self._probe.data_ptr(),),)), None
            case protocol.Describe():
                return self._describe(asked)
        raise ValueError(f"a worker does not answer {type(asked).__name__}")

    def _build(self, asked: protocol.Build) -> protocol.Built:
        self.mutates = asked.mutates
        device = "cuda" if asked.emulate else self.device
        self.op = inline.make(
            f"{_NAMESPACE}::{asked.schema}",
            {device: asked.text},
            None,
            None,
            "opjit.judge",
            asked.name,
            asked.name,
            [(), (), (), [asked.folder]],
        )
        if asked.emulate:
            emulation.runtime()
            self.emulated = emulation.binary(self.op, checked=True)
            return protocol.Built("", cached=False)
        target = target_of(self.device, None)
        store = default_store()
        wanted = CandidateBinary(describe_recipe(self.op, target, store), op=self.op)
        found = request.lookup(wanted, store)
        self.entry = found or request.fetch_or_build(wanted, store)
        return protocol.Built(self.entry.key, found is not None)

    def _load(self, asked: protocol.Load) -> protocol.LoadedCandidate:
        """Load the library, of which even the first instruction runs without rights."""
        assert self.op is not None
        if self.emulated is not None:
            return self._load_emulated(self.op, self.emulated)
        assert self.entry is not None
        reload.install([self.op])
        sandbox.limit_files(asked.file_limit)
        on_cpu = self.device == "cpu"
        if on_cpu:
            self._hold(
                "landlock", sandbox.restrict_files([*_system_folders(), str(self.entry.folder)])
            )
            self._hold("seccomp", sandbox.allow_loading())
        else:
            self._give_up()

        request.ready(self.op, backends.for_device(self.device), self.entry)
        self.call = self.op.overload
        if on_cpu and "seccomp" in self.isolation:
            sandbox.allow_computing()
        return protocol.LoadedCandidate(tuple(self.isolation))

    def _load_emulated(self, op: Op, library: Path) -> protocol.LoadedCandidate:
        """Load an emulated library. It may start programs, because a program reads the lines of findings."""
        reload.install([op])
        emulation.runtime().emu_set_checking(1)
        self._give_up()
        loader.load(emulation.entry_of(library), op.qualified)
        self.call = op.overload
        return protocol.LoadedCandidate(tuple(self.isolation))

    def _load_model(self, asked: protocol.LoadModel, data: bytearray) -> protocol.LoadedCandidate:
        os.environ.update(
            OPJIT_LAYERS=str(default_root()),
            OPJIT_CACHE=str(self.folder / "cache"),
            HOME=str(self.folder),
            TORCH_EXTENSIONS_DIR=str(self.folder / "extensions"),
        )
        self._warm_up_profiler()
        self._give_up(str(self.folder))
        self.functions = _functions()
        self.watch = Watch(self.folder)

        path = self.folder / "candidate.py"
        path.write_text(asked.text, "utf-8")
        with cpp_extension.patched():
            self.mutates = bool(asked.imports)
            sys.path.insert(0, asked.imports or str(self.folder))
            module = run_file(path)
            name = "custom_kernel" if self.mutates else "ModelNew"
            if not hasattr(module, name):
                raise DeclarationError(f"the file does not define {name}")
            self.call = getattr(module, name)
            if not self.mutates:
                torch.manual_seed(asked.seed)
                args, kwargs = protocol.deserialize(data, "cpu")
                self.call = self.call(*args, **kwargs).to(self.device).eval()
        return protocol.LoadedCandidate(tuple(self.isolation))

    def _give_up(self, *writable: str) -> None:
        self._hold("landlock", sandbox.restrict_files(sandbox.all_but_devices(), writable))
        self._hold("seccomp", sandbox.allow_programs())

    def _hold(self, name: str, in_force: bool) -> None:
        if in_force:
            self.isolation.append(name)

    def _warm_up_profiler(self) -> None:
        """Start torch's profiler once, and remove the function that could hide operators from it."""
        with operators.OperatorLog(0):
            pass
        for module in map(vars, (torch._C._autograd, torch.autograd)):
            if "_enable_record_function" in module:
                module["_enable_record_function"] = _refuse_hiding

    def _call(self, asked: protocol.CallTwice, data: bytearray) -> tuple[Called, bytearray]:
        """Call twice with the same tensors in other memory."""
        found = bytearray()
        described = []
        families: set[str] = set()
        evidence = ""
        wrote = False

        _fill_memory(True)
        for number in range(2):
            args, kwargs = values = protocol.deserialize(data, self.device)
            smallest = operators.largest(values) // 4
            log: Any = nullcontext()
            if asked.log and number == 0:
                is_python = self.op is None
                log = operators.OperatorLog(smallest) if is_python else operators.Recorder(smallest)
            with torch.no_grad(), log:
                results = self._effects(self.call(*args, **kwargs), values)
                wait(self.device)
            if not isinstance(log, nullcontext):
                families |= log.families
            if isinstance(log, operators.OperatorLog) and not log.complete:
                evidence = "switches off torch's profiler"

            self._limit(results, asked.limit // 2)
            described.append(tuple(map(describe_result, results)))
            protocol.append_bytes(found, results)
            wrote = wrote or self._wrote(values, data)
            fill_with_sentinel(results)

        evidence = self._replaced() or evidence
        if self.watch is not None:
            evidence = self.watch.evidence or evidence
        return Called(tuple(described), wrote, tuple(sorted(families)), evidence), found

    def _limit(self, results: list[Any], limit: int) -> None:
        size = protocol.size_of([describe_result(each) for each in results])
        if size > limit:
            raise VerdictReached(
                "wrong", f"returns {size} bytes, more than the reference's results"
            )

    def _replaced(self) -> str:
        """Return which functions of other modules were replaced. torch replaces some as it imports more."""
        if not self.functions:
            return ""
        now = _functions()
        replaced = []
        for name, value in self.functions.items():
            module = str(getattr(now.get(name), "__module__", ""))
            if now.get(name) is not value and not module.startswith("torch"):
                replaced.append(name)
        return f"replaces functions of other modules: {', '.join(replaced[:3])}" if replaced else ""

    def _prepare(self, asked: protocol.Prepare, data: bytearray) -> protocol.Done:
        _fill_memory(False)
        self.sent = data
        calls = protocol.deserialize(data, self.device)[: asked.count]
        self.burst = Burst.of(self.call, calls, asked.results, self.device)
        if self.device != "cpu":
            self.burst.reserve_copies()
        return protocol.Done()

    def _run(self, asked: protocol.Run) -> Ran:
        """Make the calls, and give the addresses or copies of their results."""
        with torch.inference_mode():
            self.burst.run()
            if not asked.freeze:
                effects = map(self._effects, self.burst.results, self.burst.inputs)
                self.burst.copy_results([[*tensors_of(row)] for row in effects])
                return Ran(())
            return Ran(tuple(map(self._addresses, self.burst.results, self.burst.inputs)))

    def _addresses(self, result: Any, values: Any) -> tuple[int, ...]:
        if type(result) is torch.Tensor and not self.mutates and result.is_contiguous():
            return (result.data_ptr(),)
        plain = [
            protocol.plain(each) if isinstance(each, torch.Tensor) else None
            for each in self._effects(result, values)
        ]
        self.burst.kept.append(plain)
        return tuple(0 if each is None else each.data_ptr() for each in plain)

    def _describe(self, asked: protocol.Describe) -> tuple[Results, bytearray]:
        """Describe the results of all calls, and send their copies."""
        data = bytearray()
        results = [*map(self._effects, self.burst.results, self.burst.inputs)]
        self._limit([each for row in results for each in row], asked.limit)
        protocol.append_bytes(data, self.burst.copies)
        wrote = self._wrote(self.burst.inputs, self.sent)
        described = tuple(tuple(map(describe_result, row)) for row in results)
        fill_with_sentinel(self.burst.results)  # a later call may leave its memory unwritten
        return Results(described, wrote), data

    def _effects(self, result: Any, values: Any) -> list[Any]:
        """Return the results of a call, and the arguments that it writes."""
        results = as_list(result)
        for each in results:
            kind = type(each)
            if isinstance(each, torch.Tensor) and kind not in (torch.Tensor, torch.nn.Parameter):
                raise VerdictReached(
                    "wrong",
                    f"returns a tensor that may compute later: expected torch.Tensor, got {kind.__name__}",
                )
        return [*results, *(tensors_of(values) if self.mutates else [])]

    def _wrote(self, values: Any, data: bytearray) -> bool:
        """Return whether calls wrote to their inputs."""
        if self.mutates:
            return False
        before = protocol.deserialize(data, "cpu")
        return changed(values, before[: len(values)])


def _refuse_hiding(enable: bool) -> None:
    raise VerdictReached("cheat", "hides operators from torch's profiler")


def _system_folders() -> list[str]:
    """Return folders with the files that torch, Python and the dynamic loader may still open."""
    of_python = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    packages = [str(Path(module.__file__ or "").parent) for module in (torch, request)]
    system = ["/usr", "/lib", "/lib64", "/etc", "/proc/self"]
    return [*of_python, sys.prefix, sys.base_prefix, *packages, *system]


def _fill_memory(fill: bool) -> None:
    """Make malloc fill new memory, for checks, or keep freed memory, for timing."""
    options = {_M_PERTURB: int(fill), _M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: 1 << 30}
    for option, value in options.items():
        ctypes.CDLL(None).mallopt(option, value)


def _functions() -> dict[str, Any]:
    """Return the functions of other modules that a candidate may want to replace."""
    holders: dict[str, Any] = {name: sys.modules[name] for name in _REPLACEABLE.split()}
    holders |= {
        "torch.Tensor": torch.Tensor,
        "torch.cuda.Event": torch.cuda.Event,
        "opjit.judge.burst.Burst": Burst,
        "opjit.judge.worker.CandidateWorker": CandidateWorker,
    }
    found = {}
    for name, holder in holders.items():
        members = dir(holder) if isinstance(holder, type) else [*vars(holder)]
        for member in members:
            value = inspect.getattr_static(holder, member)
            if callable(value):
                found[f"{name}.{member}"] = value
    return found

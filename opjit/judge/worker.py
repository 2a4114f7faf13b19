"""A candidate's process: builds it, gives up rights, and calls it with the tensors that the judge sends."""

import ctypes
import gc
import os
import pickle
import shutil
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opjit import api, backends, cpp_extension, files, loader, request
from opjit.builder import build
from opjit.catalog import inline, reload
from opjit.emulate import build as emulation
from opjit.errors import DeclarationError
from opjit.judge import operators, protocol, sandbox, screen
from opjit.judge.audit import Watch
from opjit.judge.burst import Burst, copied, fill_with_sentinel
from opjit.judge.inputs import DeliveredInputs
from opjit.judge.protocol import TensorSpec, describe_result
from opjit.judge.task import run_file
from opjit.judge.verdict import VerdictReached
from opjit.measure.timing import wait
from opjit.operators.op import Op
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root, default_store
from opjit.tensors import tensors_of
from opjit.testing.compare import as_list
from opjit.typed_json import typed
from opjit.wanted import OpRequest, target_of
from opjit.wanted import describe as describe_recipe

_M_PERTURB = -6
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
# Of ops: all of its entries in the cache passed the check of their object files.
_NAMESPACE = "candidate"
_REPLACEABLE = "time torch torch.cuda torch.cuda.streams torch.testing torch.nn.functional torch.autograd.profiler"
_REPLACEABLE += " builtins os json socket pickle mmap gc inspect ctypes"


def import_all() -> None:
    """Import what workers need, once for all of them."""
    # A process that initializes CUDA cannot fork workers that use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    api.declare_all()
    request.import_builder()
    with operators.Recorder(Counter()):
        torch.ones(1).add(1)
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
        self.call: Callable[..., Any] = str
        self.mutates = False
        self.watch: Watch | None = None
        self.replaced: Callable[[], str] = str

        warnings.simplefilter("ignore")  # to show one, Python reads files
        with suppress(Exception):  # the first use of the device gives the reason
            # Starts the threads and contexts that torch needs.
            torch.ones(1 << 17, device=self.device).exp().sum().item()

    def load_op(
        self,
        *,
        text: str,
        name: str,
        schema: str,
        mutates: bool,
        folder: str,
        emulate: bool,
    ) -> protocol.LoadedCandidate:
        """Build an op's library, give up rights, and load it: even its first instruction runs without rights.

        With `emulate`, the text is CUDA, which is built for the CPU.
        """
        self.mutates = mutates
        device = "cuda" if emulate else self.device
        op = inline.make(
            f"{_NAMESPACE}::{schema}",
            {device: text},
            None,
            None,
            "opjit.judge",
            name,
            name,
            [(), (), (), [folder]],
        )
        if emulate:
            self._load_emulated(op)
            return protocol.LoadedCandidate(self.isolation)

        target = target_of(self.device, None)
        store = default_store()
        wanted = CandidateBinary(describe_recipe(op, target, store), op=op)
        found = request.lookup(wanted, store)
        entry = found or request.fetch_or_build(wanted, store)
        reload.install([op])
        on_cpu = self.device == "cpu"
        if on_cpu:
            self._hold("landlock", sandbox.restrict_files([*_system_folders(), str(entry.folder)]))
            self._hold("seccomp", sandbox.allow_loading())
        else:
            self._give_up()
        request.ready(op, backends.for_device(self.device), entry)
        self.call = op.overload
        if on_cpu and "seccomp" in self.isolation:
            sandbox.allow_computing()
        return protocol.LoadedCandidate(self.isolation, entry.key, found is not None)

    def _load_emulated(self, op: Op) -> None:
        """Load an emulated library. It may start programs, because a program reads the lines of findings."""
        runtime = emulation.runtime()
        library = emulation.binary(op, checked=True)
        reload.install([op])
        runtime.emu_set_checking(1)
        self._give_up()
        loader.load(emulation.entry_of(library), op.qualified)
        self.call = op.overload

    def load_model(
        self, init: int, *, text: str, imports: str, seed: int
    ) -> protocol.LoadedCandidate:
        """Give up rights, run a Python file, and make its ModelNew with the attached arguments.

        With a directory of modules to import, its function custom_kernel is called instead.
        """
        args, kwargs = pickle.loads(protocol.read_sealed(init, protocol.MESSAGE_LIMIT))
        cache = Store(self.folder / "cache")
        files.make_private(cache.base)
        notes = default_store().notes
        if notes is not None:  # they save asking the compilers again
            with suppress(OSError):
                shutil.copytree(notes, cache.base / notes.name)
        os.environ.update(
            OPJIT_LAYERS=str(default_root()),
            OPJIT_CACHE=str(cache.root),
            HOME=str(self.folder),
            TORCH_EXTENSIONS_DIR=str(self.folder / "extensions"),
        )
        self._warm_up_profiler()
        self._give_up(str(self.folder))
        self.replaced = _comparison()
        self.watch = Watch(self.folder)

        path = self.folder / "candidate.py"
        path.write_text(text, "utf-8")
        with cpp_extension.patched():
            self.mutates = bool(imports)
            sys.path.insert(0, imports or str(self.folder))
            module = run_file(path)
            name = "custom_kernel" if self.mutates else "ModelNew"
            if not hasattr(module, name):
                raise DeclarationError(f"the file does not define {name}")
            self.call = getattr(module, name)
            if not self.mutates:
                torch.manual_seed(seed)
                self.call = self.call(*args, **kwargs).to(self.device).eval()
        return protocol.LoadedCandidate(self.isolation)

    def _give_up(self, *writable: str) -> None:
        self._hold("landlock", sandbox.restrict_files(sandbox.all_but_devices(), writable))
        self._hold("seccomp", sandbox.allow_programs())

    def _hold(self, name: str, in_force: bool) -> None:
        if in_force:
            self.isolation.append(name)

    def _warm_up_profiler(self) -> None:
        """Start torch's profiler once, and replace functions that could show it or hide operators from it."""
        with operators.profiled(Counter()):
            pass
        for module in (torch._C._autograd, torch.autograd):
            vars(module).update(_enable_record_function=_refuse_hiding, _profiler_enabled=bool)

    def prepare(
        self,
        places: int,
        *masked: int,
        count: int,
        results: list[Any],
        log: bool = False,
        fill: bool = False,
    ) -> protocol.Done:
        """Make a burst of the first calls. Their arguments have no values yet.

        `results` are the tensors of each call. `log`: record torch's operators that run. `fill`: fill all new memory.
        """
        _fill_memory(fill)
        self.log = log
        self.elements = Counter[str]()
        self.evidence = ""
        self.inputs = DeliveredInputs(places, self.device, *masked, writes=self.mutates)
        spec = [typed(each, TensorSpec) for each in results]
        self.calls = self.inputs.calls[:count]
        with self._logged():
            self.burst = Burst.of(self.call, self.calls, spec, self.device)
        reserved = self.calls if masked else []
        self.copies = [each for _ in reserved for each in self.burst.empty_results()]
        self.burst.arm()
        return protocol.Done()

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Record the operators that run in the block, if this burst is logged."""
        if not self.log:
            yield
            return
        with (operators.profiled if self.watch else operators.Recorder)(self.elements):
            yield
            self.evidence = self.evidence or self.replaced()  # before any of them is called

    def run(self, *content: int, key: int | None, limit: int) -> protocol.Ran:
        """Give the arguments their values and make the calls. Then tell the results' addresses or, with a key, copy them."""
        self.inputs.reveal(*content, key=key)
        with torch.inference_mode():
            with self._logged():
                self.burst.run()
            self.kept = [*map(self._plain_results, self.burst.results, self.burst.inputs)]
            tensors = [each for row in self.kept for each in row]
            size = sum(each.nbytes for each in tensors)
            if size > limit:
                raise VerdictReached(
                    "wrong", f"returns {size} bytes, more than the reference's results"
                )
            if content:
                addresses = tuple(each.data_ptr() for each in tensors)
                return protocol.Ran(addresses, tuple(each.nbytes for each in tensors))
            self.copies = copied(tensors, self.copies)
            wait(self.device)
            return protocol.Ran((), ())

    def _plain_results(self, result: Any, values: Any) -> list[torch.Tensor]:
        """Return the results of a call that are tensors, where the judge can read them."""
        if type(result) is torch.Tensor and not self.mutates and result.is_contiguous():
            return [result]
        found = tensors_of(self._effects(result, values))
        return [protocol.plain(each) for each in found] if self.device == "cpu" else found

    def describe(self) -> tuple[protocol.Described, int]:
        """Describe the results of all calls, and send their copies."""
        rows = map(self._effects, self.burst.results, self.burst.inputs)
        results = tuple(tuple(map(describe_result, row)) for row in rows)
        changed = not self.mutates and self.inputs.changed()
        evidence = self.evidence or self.replaced() or (self.watch.evidence if self.watch else "")
        described = protocol.Described(results, changed, self.elements, evidence)
        copies = [*map(protocol.plain, self.copies)]
        content = b"".join(ctypes.string_at(each.data_ptr(), each.nbytes) for each in copies)
        fill_with_sentinel(self.burst.results)  # a later call may leave its memory unwritten
        return described, protocol.sealed(content)

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


def _refuse_hiding(enable: bool) -> None:
    raise VerdictReached("cheat", "hides operators from torch's profiler")


def _system_folders() -> list[str]:
    """Return folders with the files that torch, Python and the dynamic loader may still open."""
    of_python = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    packages = [str(Path(module.__file__ or "").parent) for module in (torch, request)]
    system = ["/usr", "/lib", "/lib64", "/etc", "/proc/self"]
    return [*of_python, sys.prefix, sys.base_prefix, *packages, *system]


def _fill_memory(fill: bool) -> None:
    """Make malloc fill new memory, for checks, or keep freed memory, which bursts fill with NaN."""
    options = {_M_PERTURB: int(fill), _M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: 1 << 30}
    for option, value in options.items():
        ctypes.CDLL(None).mallopt(option, value)


def _comparison() -> Callable[[], str]:
    """Return a function that tells which functions of other modules were replaced since, or members of their classes.

    A candidate cannot replace what it uses: that is syntax and its own variables, except for torch's
    functions, because torch replaces some as it imports more.
    """
    holders: dict[str, Any] = {
        name: module
        for name, module in sys.modules.items()
        if name in _REPLACEABLE.split() or name.startswith("opjit.judge")
    }
    for name, module in [*holders.items()]:
        holders |= {
            f"{name}.{key}": each
            for key, each in vars(module).items()
            if isinstance(each, type) and each.__module__ == name
        }
    kept = []
    for name, holder in holders.items():
        members = vars(holder)
        for key in dir(holder):
            value = members.get(key)
            if callable(value) or isinstance(holder, type):
                code = getattr(value, "__code__", None)
                kept.append((f"{name}.{key}", members, key, value, code))

    def compare() -> str:
        for name, members, key, value, code in kept:
            now = members.get(key)
            if now is value and (code is None or value.__code__ is code):
                continue
            of_torch = name[:6] == "torch." and str(getattr(now, "__module__", ""))[:5] == "torch"
            if now is value or not of_torch:
                return f"replaces functions of other modules: {name}"
        return ""

    return compare

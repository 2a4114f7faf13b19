"""One candidate's process: builds it, gives up its rights, and calls it with the tensors that the judge sends.

Whatever it says of its results, the judge compares them; whatever it says of time, the judge has a clock of its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opjit import api, backends, cpp_extension, request
from opjit.backends import targets
from opjit.declare import registry
from opjit.declare.op import Op
from opjit.declare.sample import tensors_of
from opjit.errors import CompileError, DeclarationError, OpjitError
from opjit.judge import launch, sandbox, screen
from opjit.judge.operators import Recorder
from opjit.judge.wire import DTYPES, Channel, closing, content, loaded, packed, saved, sealed
from opjit.live import inline, reload
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root
from opjit.testing.compare import as_list
from opjit.testing.samples import storage_bytes
from opjit.wanted import OpBinary, describe, target_of

_M_PERTURB, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -6, -3, -1
_REPLACEABLE = ("time", "torch", "torch.cuda", "torch.testing", "torch.nn.functional", "builtins", "os", "json", "socket")
_KINDS = ((CompileError, "compile"), (DeclarationError, "compile"), (SyntaxError, "compile"), (screen.RefusedCandidate, "refused"))


def import_all() -> None:
    """Import what children need, once for all of them."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a process that asks CUDA itself cannot fork children that use it
    api.declare_all()
    request.import_builder()
    with Recorder():
        loaded(content(saved([torch.ones(1)])), "cpu").pop().add(1)
    gc.freeze()  # children share it


def serve(job: Channel, folder: Path, device: str, held: list[str]) -> None:
    """Do what the judge asks for, until it is gone."""
    candidate = _JudgedCode(folder, device, held)
    warnings.simplefilter("ignore")  # to show one, Python reads files
    with suppress(Exception):  # who uses the device says why
        torch.ones(1 << 17, device=device).exp().sum().item()  # starts the threads and contexts that torch needs
    _fill_memory(False)
    with suppress(EOFError):
        while True:
            message, descriptors = job.receive()
            try:
                getattr(candidate, f"on_{message['do']}")(job, message, [content(each) for each in descriptors])
            except Exception as error:
                kind = next((kind for of, kind in _KINDS if isinstance(error, of)), "raised")
                name = "" if isinstance(error, (OpjitError, screen.RefusedCandidate)) else f"{type(error).__name__}: "
                job.send({"error": kind, "message": f"{name}{error}"[:4000]})


class _JudgedCode:
    """What runs here, and the steps to it. Each `on_` method answers one kind of message."""

    def __init__(self, folder: Path, device: str, held: list[str]) -> None:
        self.folder, self.device, self.held = folder, device, held
        self.call: Callable[..., Any] = lambda *args, **kwargs: None
        self.bind: Callable[..., Callable[[], Any]] = lambda args, kwargs, results: partial(self.call, *args, **kwargs)
        self.mutates = False
        self.op: Op | None = None
        self.entry: Entry | None = None
        self.before: dict[str, Any] = {}

    # --- from text to something to call ---

    def on_build(self, job: Channel, message: dict[str, Any], _: list[bytearray]) -> None:
        """Build an op from C or CUDA text, and screen its library; nothing of it runs."""
        self.mutates = message["mutates"]
        screen.check_source(message["text"])
        name = message["name"]
        self.op = inline.make(message["schema"], {self.device: message["text"]}, None, None, "opjit.judge", name, name,
                              extra_include_paths=[message["folder"]])
        target, store = target_of(self.device, None), Store(default_root())
        wanted = OpBinary(self.op, target, describe(self.op, target, store))
        found = request.look(wanted, store)
        self.entry = found or request.obtain(wanted, store)
        screen.check_library(self.entry.library, message["operators"])
        job.send({"key": self.entry.key, "cached": found is not None})

    def on_load(self, job: Channel, message: dict[str, Any], _: list[bytearray]) -> None:
        """Give up rights, and load the op."""
        assert self.op is not None
        reload.install([self.op])
        self._give_up([])
        request.ready(self.op, backends.for_device(self.device), self.entry)
        self.call = self.op.overload
        if self.device == "cpu" and sandbox.no_system_calls():
            self.held.append("seccomp")
        job.send({"isolation": self.held})

    def on_kernel(self, job: Channel, message: dict[str, Any], _: list[bytearray]) -> None:
        """Compile device code, which the judge's own code launches."""
        screen.check_source(message["text"])
        kernel = launch.compile_text(message["text"], message["schema"], targets.here(backends.for_device("cuda")).arch)
        self.bind = kernel.load()
        job.send({"registers": kernel.registers, "spills": kernel.spills, "isolation": ["no host code"]})

    def on_python(self, job: Channel, message: dict[str, Any], data: list[bytearray]) -> None:
        """Run a file with ModelNew, which may build extensions into a cache of its own."""
        screen.check_python(message["text"])
        os.environ.update(OPJIT_LAYERS=str(default_root()), OPJIT_CACHE=str(self.folder / "cache"), HOME=str(self.folder),
                          TORCH_EXTENSIONS_DIR=str(self.folder / "extensions"))
        self._give_up([str(self.folder)])
        self.before = _functions()
        self._model(message, data, "ModelNew")
        job.send({"isolation": self.held})

    def on_reference(self, job: Channel, message: dict[str, Any], data: list[bytearray]) -> None:
        """Run the task's own reference, to be timed as candidates are."""
        self.mutates = message["mutates"]
        if message["op"]:
            [op] = [op for op in registry.add_path(message["folder"]) if op.qualified == message["op"]]
            self.call = op.reference_function
        else:
            self._model(message, data, "Model")
        job.send({})

    def _give_up(self, writable: list[str]) -> None:
        if sandbox.no_writing(writable):
            self.held.append("landlock")

    def _model(self, message: dict[str, Any], data: list[bytearray], name: str) -> None:
        path = self.folder / "candidate.py"
        path.write_text(message["text"], "utf-8")
        with cpp_extension.patched():
            module = run_file(path)
            if not hasattr(module, name):
                raise DeclarationError(f"the file defines no {name}")
            torch.manual_seed(message["seed"])
            args, kwargs = loaded(data[0], "cpu")
            self.call = getattr(module, name)(*args, **kwargs).to(self.device).eval()

    # --- calls ---

    def on_call(self, job: Channel, message: dict[str, Any], data: list[bytearray]) -> None:
        """Call twice with the same tensors in other memory. Answers with both results, and whether the tensors changed."""
        bytes_, described, changed, recorder = bytearray(), [], False, Recorder()
        _fill_memory(True)
        for _ in range(2):
            args, kwargs = values = loaded(data[0], self.device)
            with torch.no_grad():
                function = self.bind(args, kwargs, message["results"])
                with recorder if self.op is None else nullcontext():
                    results = self._effects(function(), values)
                self._wait()
            described.append(packed(results, bytes_))
            changed = changed or self._changed([function], values, data[0])
            _poison(results)
        now = _functions() if self.before else {}
        replaced = [name for name, value in now.items() if self.before.get(name) is not value
                    and not str(getattr(value, "__module__", "")).startswith("torch")]  # torch does so itself as it imports more
        self._answer(job, bytes_, {"results": described, "changed": changed, "operators": sorted(recorder.names),
                                   "replaced": replaced})

    def on_burst(self, job: Channel, message: dict[str, Any], data: list[bytearray]) -> None:
        """Make calls between the judge's go and the message that they are done; then send their results."""
        _fill_memory(False)
        calls = loaded(data[0], self.device)
        if self.device == "cpu":  # what the results will lie in, unless they are written
            _poison([torch.empty(each["shape"], dtype=DTYPES[each["dtype"]]) for each in message["results"] for _ in calls])
        with torch.inference_mode():
            functions = [self.bind(*call, message["results"]) for call in calls]
            run = self._captured(functions, calls) or (lambda: [function() for function in functions])
            gc.disable()
            self._wait()
            job.send({})
            job.receive()
            started = time.perf_counter()
            results = run()
            self._wait()
            seconds = time.perf_counter() - started
        job.send({"seconds": seconds})
        bytes_ = bytearray()
        described = [packed(self._effects(result, call), bytes_) for result, call in zip(results, calls, strict=True)]
        self._answer(job, bytes_, {"results": described, "changed": self._changed(functions, calls, data[0])})
        _poison(results)  # what a later call leaves unwritten is no result of this one
        gc.enable()

    def _captured(self, functions: list[Callable[[], Any]], calls: Any) -> Callable[[], list[Any]] | None:
        """On CUDA, capture the calls in a graph, whose replay takes the device's time and not the host's; None if it takes no graph."""
        if self.device != "cuda":
            return None
        graph, results = torch.cuda.CUDAGraph(), []
        with suppress(RuntimeError), torch.cuda.graph(graph):
            results += [function() for function in functions]
        if len(results) < len(functions):
            return None
        _poison(results, calls)  # the capture computed nothing, and the replay must write all of it

        def replay() -> list[Any]:
            graph.replay()
            return results

        return replay

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def _effects(self, result: Any, values: Any) -> list[Any]:
        """The results of a call, and the arguments that it writes."""
        results = as_list(result)
        for each in results:
            if isinstance(each, torch.Tensor) and type(each) is not torch.Tensor:
                raise screen.RefusedCandidate(f"returns a tensor that computes later: a {type(each).__name__}")
        return [*results, *(tensors_of(values) if self.mutates else [])]

    def _changed(self, functions: list[Any], values: Any, data: bytearray) -> bool:
        """Whether calls wrote to their inputs or, where that can be seen, beside their results."""
        if any(launch.overrun(function) for function in functions):
            return True
        pairs = zip(tensors_of(values), tensors_of(loaded(data, "cpu")), strict=True)
        return not self.mutates and not all(torch.equal(storage_bytes(one).cpu(), storage_bytes(other)) for one, other in pairs)

    @staticmethod
    def _answer(job: Channel, bytes_: bytearray, message: dict[str, Any]) -> None:
        with closing(sealed(bytes_)) as answer:
            job.send(message, answer)


def run_file(path: Path) -> Any:
    """Run a file of Python as a module of its own."""
    spec = importlib.util.spec_from_file_location("opjit_judged", path)
    assert spec is not None
    assert spec.loader is not None  # a file has one
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fill_memory(fill: bool) -> None:
    """Have glibc fill new memory with a pattern, or else return none to the system: both take time, of builds and of measurements."""
    for option, value in ((_M_PERTURB, int(fill)), (_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 1 << 30)):
        ctypes.CDLL(None).mallopt(option, value)


def _functions() -> dict[str, Any]:
    """The functions of others that a candidate may want to replace."""
    places = {**{name: sys.modules[name] for name in _REPLACEABLE}, "torch.Tensor": torch.Tensor, "torch.cuda.Event": torch.cuda.Event}
    return {f"{place}.{name}": value for place, holder in places.items() for name, value in [*vars(holder).items()] if callable(value)}


def _poison(results: Any, inputs: Any = ()) -> None:
    """Fill what results lie in, from the first element to the last, unless that is an input: guards and gaps keep their bytes."""
    kept = {each.untyped_storage().data_ptr() for each in tensors_of(inputs)}
    with torch.inference_mode():
        for each in tensors_of(results):
            if each.numel() and each.untyped_storage().data_ptr() not in kept:
                first, size = each.storage_offset(), each.element_size()
                last = first + sum((length - 1) * stride for length, stride in zip(each.shape, each.stride(), strict=True))
                storage_bytes(each)[first * size:(last + 1) * size].fill_(0xFF)

"""One candidate's process: builds it, gives up its rights, and calls it with the tensors that the judge sends."""

import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from opjit import api, backends, cpp_extension, request
from opjit.declare.op import Op
from opjit.declare.sample import tensors_of
from opjit.errors import DeclarationError
from opjit.judge import sandbox, screen
from opjit.judge.burst import Burst, changed, poison
from opjit.judge.task import Recorder, run_file
from opjit.judge.verdict import Ended
from opjit.judge.wire import content, loaded, packed, saved
from opjit.live import inline, reload
from opjit.measure.timing import wait
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root
from opjit.testing.compare import as_list
from opjit.wanted import OpBinary, describe, target_of

_M_PERTURB, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -6, -3, -1
_REPLACEABLE = (
    "time",
    "torch",
    "torch.cuda",
    "torch.testing",
    "torch.nn.functional",
    "builtins",
    "os",
    "json",
    "socket",
)


def import_all() -> None:
    """Import what children need, once for all of them."""
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # a process that asks CUDA itself cannot fork children that use it
    api.declare_all()
    request.import_builder()
    with Recorder():
        loaded(content(saved([torch.ones(1)])), "cpu").pop().add(1)
    gc.freeze()  # children share it


class JudgedCode:
    """What runs here, and the steps to it. Each `on_` method answers one kind of message."""

    def __init__(self, folder: Path, device: str, held: list[str]) -> None:
        self.folder, self.device, self.held = folder, device, held
        self.call: Callable[..., Any] = lambda *args, **kwargs: None
        self.mutates = False
        self.op: Op | None = None
        self.entry: Entry | None = None
        self.before: dict[str, Any] = {}
        warnings.simplefilter("ignore")  # to show one, Python reads files
        with suppress(Exception):  # the first use of the device says why
            torch.ones(
                1 << 17, device=device
            ).exp().sum().item()  # starts the threads and contexts that torch needs
        _fill_memory(False)

    def on_build(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Build an op from C or CUDA text, and screen its library; nothing of it runs."""
        self.mutates = message["mutates"]
        screen.check_source(message["text"])
        name = message["name"]
        self.op = inline.make(
            message["schema"],
            {self.device: message["text"]},
            None,
            None,
            "opjit.judge",
            name,
            name,
            [(), (), (), [message["folder"]]],
        )  # the folder of its headers
        target, store = target_of(self.device, None), Store(default_root())
        wanted = OpBinary(self.op, target, describe(self.op, target, store))
        found = request.look(wanted, store)
        self.entry = found or request.obtain(wanted, store)
        screen.check_library(self.entry.library, message["operators"])
        return {"key": self.entry.key, "cached": found is not None}

    def on_load(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Give up rights, and load the op."""
        assert self.op is not None
        reload.install([self.op])
        self._give_up()
        request.ready(self.op, backends.for_device(self.device), self.entry)
        self.call = self.op.overload
        if self.device == "cpu" and sandbox.no_system_calls():
            self.held.append("seccomp")
        return {"isolation": self.held}

    def on_python(self, message: dict[str, Any], data: list[bytearray]) -> dict[str, Any]:
        """Run a file with ModelNew, which may build extensions into a cache of its own."""
        screen.check_python(message["text"])
        os.environ.update(
            OPJIT_LAYERS=str(default_root()),
            OPJIT_CACHE=str(self.folder / "cache"),
            HOME=str(self.folder),
            TORCH_EXTENSIONS_DIR=str(self.folder / "extensions"),
        )
        self._give_up(str(self.folder))
        self.before = _functions()
        path = self.folder / "candidate.py"
        path.write_text(message["text"], "utf-8")
        with cpp_extension.patched():
            module = run_file(path)
            if not hasattr(module, "ModelNew"):
                raise DeclarationError("the file defines no ModelNew")
            torch.manual_seed(message["seed"])
            args, kwargs = loaded(data[0], "cpu")
            self.call = module.ModelNew(*args, **kwargs).to(self.device).eval()
        return {"isolation": self.held}

    def _give_up(self, *writable: str) -> None:
        if sandbox.no_writing(writable):
            self.held.append("landlock")

    def on_call(self, message: dict[str, Any], data: list[bytearray]) -> dict[str, Any]:
        """Call twice with the same tensors in other memory. Answers with both results, and whether the tensors changed."""
        bytes_, described, written, recorder = bytearray(), [], False, Recorder()
        _fill_memory(True)
        for _ in range(2):
            args, kwargs = values = loaded(data[0], self.device)
            with torch.no_grad(), recorder if self.op is None else nullcontext():
                results = self._effects(self.call(*args, **kwargs), values)
                wait(self.device)
            described.append(packed(results, bytes_))
            written = written or self._wrote(values, data[0])
            poison(results)
        now = _functions() if self.before else {}
        replaced = [
            name
            for name, value in now.items()
            if self.before.get(name) is not value
            and not str(getattr(value, "__module__", "")).startswith("torch")
        ]  # torch does so itself as it imports more
        return {
            "results": described,
            "changed": written,
            "operators": sorted(recorder.names),
            "replaced": replaced,
            "data": bytes_,
        }

    def on_prepare(self, message: dict[str, Any], data: list[bytearray]) -> dict[str, Any]:
        """Make a burst of calls ready to run."""
        _fill_memory(False)
        calls, self.sent = loaded(data[0], self.device), data[0]
        self.burst = Burst.of(self.call, calls, message["results"], self.device)
        return {}

    def on_arm(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Prepare all that takes time and is not the calls'."""
        self.burst.arm()
        return {}

    def on_run(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Make the calls between the judge's message and the answer."""
        with torch.inference_mode():
            self.burst.run()
        return {}

    def on_results(self, message: dict[str, Any], _: list[bytearray]) -> dict[str, Any]:
        """Send the results of all calls."""
        bytes_ = bytearray()
        described = [
            packed(self._effects(*each), bytes_)
            for each in zip(self.burst.results, self.burst.inputs, strict=True)
        ]
        written = self._wrote(self.burst.inputs, self.sent)
        poison(self.burst.results)  # what a later call leaves unwritten is no result of this one
        return {"results": described, "changed": written, "data": bytes_}

    def _effects(self, result: Any, values: Any) -> list[Any]:
        """The results of a call, and the arguments that it writes."""
        results = as_list(result)
        for each in results:
            if isinstance(each, torch.Tensor) and type(each) is not torch.Tensor:
                raise Ended(
                    "cheat", f"returns a tensor that computes later: a {type(each).__name__}"
                )
        return [*results, *(tensors_of(values) if self.mutates else [])]

    def _wrote(self, values: Any, data: bytearray) -> bool:
        """Whether calls wrote to their inputs."""
        return not self.mutates and changed(values, loaded(data, "cpu"))


def _fill_memory(fill: bool) -> None:
    """Have glibc fill new memory with a pattern, or else return none to the system: both take time, of builds and of measurements."""
    for option, value in (
        (_M_PERTURB, int(fill)),
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, 1 << 30),
    ):
        ctypes.CDLL(None).mallopt(option, value)


def _functions() -> dict[str, Any]:
    """The functions of others that a candidate may want to replace."""
    places = {
        **{name: sys.modules[name] for name in _REPLACEABLE},
        "torch.Tensor": torch.Tensor,
        "torch.cuda.Event": torch.cuda.Event,
    }
    return {
        f"{place}.{name}": value
        for place, holder in places.items()
        for name, value in [*vars(holder).items()]
        if callable(value)
    }

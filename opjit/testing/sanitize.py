"""An op's samples under the sanitizers, in a process of their own: gcc's address and undefined for C, compute-sanitizer's for CUDA.

The CPU's kernel is compiled once more, with the sanitizers in it, and takes the place of the op's own in the child process. torch
itself is not built for them: its allocations are checked, its mixture of new and free is not. Under compute-sanitizer the samples
are made on the CPU and copied, so that hardly any kernel but the op's runs, and torch's caching allocator is off, so that each
tensor is an allocation that the tool knows.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from opjit import api, backends, catalog, glue, resources, targets, testing, toolchain
from opjit.errors import OpjitError
from opjit.op import Op
from opjit.recipe import RUNTIME
from opjit.samples import Sample, Skipped, assert_close_enough, listed, outcome, samples

FOR_C = ("address", "undefined")
FOR_CUDA: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", "4096"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
}
_CXX = "libstdc++.so.6"  # libasan looks for its __cxa_throw when the process starts, and ends it at torch's first exception otherwise
FOUND = 86  # the exit code that says that compute-sanitizer found something
_REPORT = re.compile(r"^.*(?:ERROR: AddressSanitizer: |: runtime error: |========= (?:Error|Warning|Invalid|Uninitialized|Potential)).*$",
                     re.MULTILINE)


class UnknownSanitizer(OpjitError, ValueError):
    """No sanitizer has that name."""


def parse(text: str) -> list[str]:
    """``"address,undefined"`` as a list.

    Raises:
        UnknownSanitizer: names the ones there are.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in (*FOR_C, *FOR_CUDA):
            raise UnknownSanitizer(f"no sanitizer is called {name!r}; there are {', '.join(FOR_C)} for C and {', '.join(FOR_CUDA)} "
                                   "for CUDA")
    return names


def lines(op: Op, device: str, names: Sequence[str]) -> Iterable[testing.Line]:
    """One line for each sanitizer; gcc's two run in one process."""
    for_c = [name for name in names if name in FOR_C]
    if for_c and device == "cpu":
        yield testing.outcome_of("+".join(for_c), lambda: _under_gcc(op, for_c))
    for name in names:
        if name in FOR_CUDA and device == "cuda":
            yield testing.outcome_of(name, lambda name=name: _under_tool(op, name))  # type: ignore[misc]
        elif (name in FOR_C) != (device == "cpu"):
            yield testing.Line(name, "skipped", f"is for {'C' if name in FOR_C else 'CUDA'} kernels")


def _under_gcc(op: Op, names: Sequence[str]) -> str:
    compiler = toolchain.require_compiler(None)
    asked = ([compiler.path, f"-print-file-name=lib{'asan' if name == 'address' else 'ubsan'}.so"] for name in names)
    runtimes = [subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() for command in asked]
    if not all(map(os.path.isabs, runtimes)):
        raise Skipped(f"{compiler.path} has no library for -fsanitize={','.join(names)}")
    with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
        library = instrumented(op, names, compiler.path, Path(folder))
        done = _child([op], [sys.executable], str(library), {
            "LD_PRELOAD": " ".join([*runtimes, _CXX]), "UBSAN_OPTIONS": "print_stacktrace=1",
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:verify_asan_link_order=0"})
    return _verdict(done, op.folder)


def instrumented(op: Op, names: Sequence[str], compiler: str, folder: Path) -> Path:
    """The op's CPU library with sanitizers in it, linked to the torch at hand."""
    backend = backends.for_device("cpu")
    target, source = targets.here(backend), op.source(backend)
    headers, library = resources.folder("kernels_c"), folder / "sanitized.so"
    for name, text in glue.render(op.schema, backend.name, backend.dispatch_key, source.name, backend.stream).items():
        (folder / name).write_text(text, encoding="utf-8")
    flags = api.flags_of(op, target)
    march = [flag for flag in flags.c if flag.startswith("-march=")]
    own = list(op.extra.c) if op.extra else []
    command = [compiler, "-std=gnu11", "-O1", "-g", *march, *own, "-fPIC", "-shared", f"-fsanitize={','.join(names)}",
               "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-fexceptions", "-fvisibility=hidden", f"-I{source.parent}",
               f"-I{headers}", *(f"-I{path}" for path in flags.include),
               *(str(path) for path in sorted(folder.glob("*.c"))), str(headers / RUNTIME),
               "-o", str(library), f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", *flags.link]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"the kernel does not compile with -fsanitize={','.join(names)}: {done.stderr.strip()}")
    return library


def find_tool() -> str | None:
    """compute-sanitizer of the CUDA Toolkit, or on PATH."""
    nvcc = toolchain.find_nvcc(None)
    beside = [f"{nvcc.root}/bin/compute-sanitizer", f"{nvcc.root}/compute-sanitizer/compute-sanitizer"] if nvcc else []
    return next(filter(None, map(shutil.which, [*beside, "compute-sanitizer"])), None)


def _under_tool(op: Op, name: str) -> str:
    tool = find_tool()
    if tool is None:
        raise Skipped("no compute-sanitizer: it comes with the CUDA Toolkit")
    return _verdict(under_tool(tool, name, [op]), op.folder)


def under_tool(tool: str, name: str, ops: Sequence[Op]) -> subprocess.CompletedProcess[str]:
    """Call ops' samples under one of compute-sanitizer's tools. They are built before: under the tool only the kernels shall be slow."""
    for op in ops:
        api.entry(op, targets.here(backends.for_device("cuda")))
    before = [tool, "--tool", name, "--error-exitcode", str(FOUND), "--report-api-errors", "no", *FOR_CUDA[name], sys.executable]
    return _child(ops, before, "", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def _child(ops: Sequence[Op], command: list[str], library: str, changes: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for op in ops:
        if not (op.folder / "op.py").is_file():
            raise Skipped(f"another process cannot declare the op: there is no op.py in {op.folder}")
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]))
    arguments = [library, *(text for op in ops for text in (str(op.folder), op.qualified))]
    return subprocess.run([*command, "-m", "opjit.sanitize", *arguments], text=True, check=False, errors="replace",
                          env={**os.environ, "PYTHONPATH": path, **changes}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _verdict(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    if done.returncode == 0:
        return ", ".join(re.findall(r"^\S+: (\d+ calls)$", done.stdout, re.MULTILINE))
    report = _REPORT.search(done.stdout)
    told = report[0].strip("= ") if report else " ".join(done.stdout.strip().splitlines()[-1:])
    place = re.search(rf"^ *#\d+ \S+ in \S+ ({re.escape(str(folder))}/\S+)", done.stdout, re.MULTILINE)
    where = f"{place[1]}: " if place and place[1] not in told else ""
    raise AssertionError(f"exit code {done.returncode}: {where}{told}")


def _uploaded(value: object) -> object:
    """A tensor's copy on the GPU, with its strides and gaps, made without a kernel."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).cuda().untyped_storage()
    return torch.empty(0, dtype=value.dtype, device="cuda").set_(storage, value.storage_offset(), value.shape, value.stride())


def _call_samples(op: Op, library: str) -> int:
    """In the child process: call every sample, with one thread and with three where the kernel is C, and a refused call."""
    if not library:
        for args, kwargs in op.sample("cpu"):
            sample = Sample(args, kwargs)
            on_gpu = Sample(*tree_map(_uploaded, (args, kwargs)))
            found = [*listed(op(*on_gpu.args, **on_gpu.kwargs)), *(on_gpu.tensors() if op.schema.mutates else [])]
            assert_close_enough(tree_map(_downloaded, found), outcome(op.plain, op, sample), sample)
        return len(samples(op, "cpu"))
    if ctypes.CDLL(library).opjit_register() != 0:
        raise AssertionError("torch refused the instrumented kernel")
    calls = samples(op, "cpu")
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for sample in calls:
            assert_close_enough(outcome(op.overload, op, sample), outcome(op.plain, op, sample), sample)
    try:
        bad = calls[0].map(lambda t: torch.zeros_like(t, dtype=torch.float8_e4m3fn))
        op(*bad.args, **bad.kwargs)
    except RuntimeError:
        pass  # whether it is refused is a check of its own; here it is the way out that is looked at
    return 2 * len(calls) + 1


def _downloaded(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def main(library: str, *ops: str) -> None:
    """The child process: an instrumented library or an empty string, then an op's folder and name, and more of them."""
    for folder, qualified in zip(ops[::2], ops[1::2], strict=True):
        testing.load(Path(folder))
        print(f"{qualified}: {_call_samples(catalog.find(qualified), library)} calls", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

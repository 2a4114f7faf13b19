"""Checks of the compilers: a bundled op is compiled, linked, loaded and run.

That happens in a subprocess with its own cache, so a crash harms neither the doctor nor the user's cache.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import opjit
from opjit import backends, processes, request
from opjit.declare import registry
from opjit.doctor.folders import nearest_existing
from opjit.doctor.report import NOTE, OK, PROBLEM, WARNING, Observation, from_error
from opjit.errors import CacheWarning, OpjitError, ToolMissing
from opjit.recipe import toolchain
from opjit.recipe.toolchain import Nvcc
from opjit.store import elf
from opjit.store.store import default_root
from opjit.wanted import target_of

TIMEOUT = 50.0  # seconds for one op, which takes two to five
_ARCH = "sm_90"  # the arch of the CUDA op on a machine without a GPU
_OP = "tensor_negate"


def c_op() -> Iterator[Observation]:
    """Check the C compiler, ninja, and an op for the CPU."""
    return _in_subprocess("C op", "c")


def cuda_op() -> Iterator[Observation]:
    """Check nvcc, whether it matches torch, and an op for this machine's GPU or, without one, for another machine's."""
    return _in_subprocess("CUDA op", "cuda")


def _in_subprocess(about: str, kind: str) -> Iterator[Observation]:
    """Yield the observations of a subprocess, which ends with all that it started."""
    with _temporary_folder(None) as folder, _temporary_folder(nearest_existing(default_root())) as cache:
        found = Path(folder, "observations")
        found.touch(mode=0o600)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OPJIT_")} | {"OPJIT_CACHE": cache}
        command = [sys.executable, "-c", f"from opjit.doctor import compilers; compilers.main({kind!r}, {str(found)!r})"]
        done = processes.run(command, limit=TIMEOUT, env=environment, cwd=Path(opjit.__file__).parents[1], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        yield from (Observation(*json.loads(line)) for line in found.read_text(encoding="utf-8").splitlines())
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if last.startswith(processes.LATE):
        yield Observation(about, PROBLEM, f"still compiling or running after {TIMEOUT:.0f} s",
                          f"run it by hand to see where it hangs: OPJIT_VERBOSE=1 opjit get {_OP}")
    elif done.returncode != 0:
        code = done.returncode
        ended = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
        yield Observation(about, PROBLEM, f"the subprocess ended with {ended}: {last}",
                          "if this names torch, reinstall torch; otherwise report a bug with the output of this command")


def _temporary_folder(parent: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Make a folder in `parent`, or in the system's temporary folder if `parent` is None or cannot be written."""
    try:
        return tempfile.TemporaryDirectory(prefix=".opjit-doctor-", dir=parent, ignore_cleanup_errors=True)
    except OSError:
        return tempfile.TemporaryDirectory(prefix="opjit-doctor-", ignore_cleanup_errors=True)


def main(kind: str, path: str) -> None:
    """Write each observation to a file at once, in the subprocess, so that a crash does not lose it."""
    warnings.simplefilter("always", CacheWarning)
    with open(path, "a", encoding="utf-8") as file:
        for observation in _check_c() if kind == "c" else _check_cuda():
            file.write(json.dumps(observation) + "\n")
            file.flush()


def _tools() -> Iterator[Observation]:
    try:
        compiler = toolchain.require_compiler(None)
        yield Observation("C compiler", OK, f"{compiler.path}: {compiler.version}, for {compiler.machine}")
    except (ToolMissing, OSError) as error:
        yield from_error("C compiler", PROBLEM, error, "set CC to a gcc or clang")
    try:
        yield Observation("ninja", OK, f"in {toolchain.require_ninja()}")
    except ToolMissing as error:
        yield from_error("ninja", PROBLEM, error)


def _have_tools() -> bool:
    return all(tool.state == OK for tool in _tools())


def _check_c() -> Iterator[Observation]:
    yield from _tools()
    if _have_tools():
        yield from _build_and_call("cpu", "C op")
    else:
        yield Observation("C op", NOTE, "not tried, because a tool is missing")


def _check_cuda() -> Iterator[Observation]:
    backend = backends.for_device("cuda")
    here, nvrtc = backend.available() is None, toolchain.find_nvrtc(backend.runtime(None), None)
    if nvrtc is None:
        yield Observation("NVRTC", NOTE, "there is none, so nvcc compiles CUDA ops, in three times the time", toolchain.INSTALL_NVRTC)
    else:
        yield Observation("NVRTC", OK, f"CUDA {nvrtc.version.partition(' ')[0]}: {nvrtc.library}")
    try:
        nvcc = toolchain.find_nvcc(None)
    except (ToolMissing, OSError) as error:
        yield from_error("nvcc", PROBLEM, error, "put another nvcc on PATH, or set CUDA_HOME")
        return
    if nvcc is None and nvrtc is None:
        yield Observation("nvcc", WARNING if here else NOTE,
                          "there is none, so CUDA ops cannot be built here; those in a cache or a wheel still work",
                          f"{toolchain.INSTALL_NVRTC}, or install the CUDA Toolkit of torch's CUDA version" if here else "")
        return
    mismatch = None
    if nvcc is None:
        yield Observation("nvcc", NOTE, "there is none, so the few CUDA files that NVRTC does not take cannot be built")
    else:
        yield Observation("nvcc", OK, f"CUDA {nvcc.version} ({nvcc.build}) in {nvcc.root}")
        mismatch = version_mismatch(nvcc, here and nvrtc is None)
    if mismatch is not None:
        yield mismatch
    if not _have_tools():
        yield Observation("CUDA op", NOTE, "not tried, because a tool is missing")
    elif not here or (mismatch is not None and mismatch.state == PROBLEM):
        yield _cross_compile()
    else:
        yield from _build_and_call("cuda", "CUDA op")


def version_mismatch(nvcc: Nvcc, gpu: bool) -> Observation | None:
    """Find a difference in major version: a binary needs the CUDA runtime of its nvcc, and the process has torch's."""
    if torch.version.cuda is None or torch.version.cuda.partition(".")[0] == nvcc.version.partition(".")[0]:
        return None
    major = torch.version.cuda.partition(".")[0]
    return Observation("CUDA versions", PROBLEM if gpu else WARNING,
                       f"nvcc is from CUDA {nvcc.version} and torch {torch.__version__} from CUDA {torch.version.cuda}, so binaries "
                       "of this nvcc do not run with this torch",
                       f"set CUDA_HOME to a CUDA {major} toolkit, or install a torch for CUDA {nvcc.version.partition('.')[0]}")


def _build_and_call(device: str, about: str) -> Iterator[Observation]:
    """Build the op for this machine, load it and call it."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            negate = opjit.get(_OP, device)
            seconds = time.perf_counter() - started
            result = negate(torch.arange(1000, dtype=torch.float32, device=device)).tolist()
        except Exception as error:
            yield _failed(about, error)
            return
    if result == [-float(i) for i in range(1000)]:
        where = f" on {torch.cuda.get_device_name()}" if device == "cuda" else ""
        yield Observation(about, OK, f"built in {seconds:.2f} s, loaded and run{where}: the result is correct")
    else:
        yield Observation(about, PROBLEM, "built and run, but the result is wrong",
                          "the compiler or the machine is at fault: set CC to another compiler")
    for warning in caught:
        if warning.category is CacheWarning:
            yield Observation(about, WARNING, f"it worked, but {str(warning.message).splitlines()[0]}", "see the lines about the cache")


def _cross_compile() -> Observation:
    """Build the op for a GPU that is not here, and inspect the binary."""
    started = time.perf_counter()
    try:
        entry = request.entry(registry.find(_OP), target_of("cuda", _ARCH))
        seconds = time.perf_counter() - started
        found = elf.inspect(entry.library.read_bytes())
    except Exception as error:
        return _failed("CUDA op", error)
    runtime = next((name for name in found.needed if name.startswith("libcudart")), "no CUDA runtime")
    return Observation("CUDA op", OK, f"built for {_ARCH} in {seconds:.2f} s, but not run: its binary holds code for "
                                      f"{', '.join(sorted(found.cuda_archs))} and needs {runtime}")


def _failed(about: str, error: Exception) -> Observation:
    todo = f"OPJIT_VERBOSE=1 opjit get {_OP} shows the build"
    if re.search(r"unsupported (GNU|clang) version", str(error)):
        todo = "set CC to a gcc or clang that this nvcc accepts; its message names the newest, and NVIDIA's installation guide lists them"
    if not isinstance(error, OpjitError):
        return Observation(about, PROBLEM, f"{type(error).__name__}: {error}".splitlines()[0], todo)
    return from_error(about, PROBLEM, error, todo)

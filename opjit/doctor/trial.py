"""A tiny op, really compiled, linked, loaded and run: in a process and a cache of its own, so that nothing that goes wrong there
harms the doctor or the user's cache."""

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
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

import opjit
from opjit import api, backends, binary, toolchain
from opjit.doctor.finding import NOTE, OK, PROBLEM, WARNING, Finding, from_error
from opjit.errors import CacheWarning, OpjitError, ToolMissing
from opjit.op import Op
from opjit.toolchain import Nvcc

SECONDS = 50.0  # for a trial; one takes two to five
_ARCH = "sm_90"  # for a CUDA op where no GPU asks for its own
_TWICE = """
opjit_status twice_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = 2 * ((const float *)x->data)[i];
    return OPJIT_OK;
}
"""
_TWICE_CUDA = """
static __global__ void twice_kernel(const float *from, float *to, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = 2 * from[i];
}

opjit_status twice_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    twice_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}
"""


def c_op() -> list[Finding]:
    """The C compiler, ninja, and an op for the CPU."""
    return _in_child("C op", "c")


def cuda_op() -> list[Finding]:
    """nvcc, how it fits torch, and an op for the GPU here, or for one that is not."""
    return _in_child("CUDA op", "cuda")


def _in_child(about: str, kind: str) -> list[Finding]:
    """What a process of its own finds; it and all that it started are gone afterwards."""
    with ExitStack() as leaving:
        folder = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="opjit-doctor-", ignore_cleanup_errors=True)))
        found = folder / "findings"
        found.touch(mode=0o600)
        cache = leaving.enter_context(tempfile.TemporaryDirectory(prefix=".opjit-doctor-", dir=_beside_cache(), ignore_cleanup_errors=True))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OPJIT_")} | {"OPJIT_CACHE": cache}
        command = [sys.executable, "-c", f"from opjit.doctor import trial; trial.main({kind!r}, {str(found)!r})"]
        with open(folder / "output", "w+b") as output:
            process = subprocess.Popen(command, env=environment, cwd=Path(opjit.__file__).parents[1], stdin=subprocess.DEVNULL,
                                       stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: int | None = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                _kill_session(process.pid)
                process.wait()
                code = None
            output.seek(0)
            told = output.read().decode(errors="replace").strip().splitlines()
        findings = [Finding(*json.loads(line)) for line in found.read_text(encoding="utf-8").splitlines()]
    if code is None:
        return [*findings, Finding(about, PROBLEM, f"no end after {SECONDS:.0f} s of compiling and running",
                                   "run it by hand to see where it hangs: OPJIT_VERBOSE=1 opjit get allreduce")]
    if code != 0:
        ended = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
        return [*findings, Finding(about, PROBLEM, f"the process that tried it ended with {ended}: {told[-1] if told else 'no output'}",
                                   "if it names torch, reinstall that; else report it with the output of this command")]
    return findings


def _kill_session(leader: int) -> None:
    """Kill a process that leads a session with all that it started: ninja gives each compiler a group of its own."""
    from opjit.doctor.places import process

    while members := [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
                      if process(pid)[1] == leader and process(pid)[0] != "Z"]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _beside_cache() -> Path | None:
    """A folder on the cache's filesystem; None where nothing can be written there, and the system's own will do."""
    from opjit.doctor.places import existing, room_to_write
    from opjit.store import default_root

    place = existing(default_root())
    return place if room_to_write(place) else None


def main(kind: str, path: str) -> None:
    """The child: leave each finding in a file as soon as it is there."""
    warnings.simplefilter("always", CacheWarning)
    with open(path, "a", encoding="utf-8") as file:
        for finding in _try_c() if kind == "c" else _try_cuda():
            file.write(json.dumps(finding) + "\n")
            file.flush()


def _try_c() -> Iterator[Finding]:
    tools = 0
    try:
        compiler = toolchain.require_compiler(None)
        yield Finding("C compiler", OK, f"{compiler.path}: {compiler.version}, for {compiler.machine}")
        tools += 1
    except (ToolMissing, OSError) as error:
        yield from_error("C compiler", PROBLEM, error, "set CC to a gcc or clang")
    try:
        yield Finding("ninja", OK, f"in {toolchain.require_ninja()}")
        tools += 1
    except ToolMissing as error:
        yield from_error("ninja", PROBLEM, error)
    if tools < 2:
        yield Finding("C op", NOTE, "not tried, for want of a tool")
        return
    yield from _run(opjit.inline("opjit_doctor::twice(Tensor x) -> Tensor", c=_TWICE, like="x"), "cpu", "C op")


def _try_cuda() -> Iterator[Finding]:
    here = backends.for_device("cuda").available() is None
    try:
        nvcc = toolchain.find_nvcc(None)
    except (ToolMissing, OSError) as error:
        yield from_error("nvcc", PROBLEM, error, "put another one on PATH, or set CUDA_HOME")
        return
    if nvcc is None:
        yield Finding("nvcc", WARNING if here else NOTE, "there is none, so CUDA ops are not built here; those in a cache or a wheel work",
                      "install the CUDA Toolkit of torch's CUDA version, or point CUDA_HOME at it" if here else "")
        return
    yield Finding("nvcc", OK, f"CUDA {nvcc.version} ({nvcc.build}) in {nvcc.root}")
    mismatch = cuda_versions(nvcc, here)
    if mismatch is not None:
        yield mismatch
    if toolchain.find_ninja() is None or toolchain.find_compiler(None) is None:
        yield Finding("CUDA op", NOTE, "not tried, for want of a tool")
        return
    op = opjit.inline("opjit_doctor::twice(Tensor x) -> Tensor", cuda=_TWICE_CUDA, like="x")
    if not here or (mismatch is not None and mismatch.state == PROBLEM):
        yield _cross_compile(op)
    else:
        yield from _run(op, "cuda", "CUDA op")


def cuda_versions(nvcc: Nvcc, gpu: bool) -> Finding | None:
    """What is wrong with an nvcc beside this torch: a binary asks for the CUDA runtime of the nvcc's major version, and the process has
    torch's."""
    if torch.version.cuda is None or torch.version.cuda.partition(".")[0] == nvcc.version.partition(".")[0]:
        return None
    major = torch.version.cuda.partition(".")[0]
    return Finding("CUDA versions", PROBLEM if gpu else WARNING,
                   f"nvcc is of CUDA {nvcc.version} and torch {torch.__version__} of CUDA {torch.version.cuda}, so what that nvcc builds "
                   "does not run with this torch",
                   f"set CUDA_HOME to a CUDA {major} toolkit, or install a torch for CUDA {nvcc.version.partition('.')[0]}")


def _run(op: Op, device: str, about: str) -> Iterator[Finding]:
    """Build an op for this machine, load it and call it."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            opjit.get(op.qualified, device)
            seconds = time.perf_counter() - started
            x = torch.arange(1000, dtype=torch.float32, device=device)
            result, right = op(x).tolist(), [2.0 * i for i in range(1000)]
        except Exception as error:
            yield _failed(about, error)
            return
    if result == right:
        where = f" on {torch.cuda.get_device_name()}" if device == "cuda" else ""
        yield Finding(about, OK, f"built in {seconds:.2f} s, loaded and run{where}: the result is right")
    else:
        yield Finding(about, PROBLEM, "built and run, but its result is wrong",
                      "the compiler or the machine is at fault: set CC to another compiler")
    for warning in caught:
        if warning.category is CacheWarning:
            yield Finding(about, WARNING, f"it worked, but {str(warning.message).splitlines()[0]}", "see what is said of the cache")


def _cross_compile(op: Op) -> Finding:
    """Build for a GPU that is not here, and look into the binary."""
    started = time.perf_counter()
    try:
        entry = api.entry(op, api.wanted("cuda", _ARCH))
        seconds = time.perf_counter() - started
        found = binary.inspect(entry.library.read_bytes())
    except Exception as error:
        return _failed("CUDA op", error)
    runtime = next((name for name in found.needed if name.startswith("libcudart")), "no CUDA runtime")
    return Finding("CUDA op", OK, f"built for {_ARCH} in {seconds:.2f} s and not run: its binary holds code for "
                                  f"{', '.join(sorted(found.cuda_archs))} and needs {runtime}")


def _failed(about: str, error: Exception) -> Finding:
    todo = "OPJIT_VERBOSE=1 opjit get allreduce shows the build"
    if re.search(r"unsupported (GNU|clang) version", str(error)):
        todo = "set CC to a gcc or clang that this nvcc takes; its message names the newest, and NVIDIA's installation guide lists them"
    if not isinstance(error, OpjitError):
        return Finding(about, PROBLEM, f"{type(error).__name__}: {error}".splitlines()[0], todo)
    return from_error(about, PROBLEM, error, todo)

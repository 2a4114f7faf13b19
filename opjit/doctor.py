"""``opjit doctor``: find out why ops cannot be built, cached or loaded on this machine, and how to fix it.

The checks run one after another, and each line is printed immediately. If a filesystem or driver hangs, the status line names the check.
"""

import difflib
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.console import Console

import opjit
from opjit import backends, files, processes, request
from opjit.catalog import registry
from opjit.cpp_extension.entries import entries
from opjit.environment import SWITCHES, VARIABLES
from opjit.errors import OpjitError, ToolMissing
from opjit.measure.units import busy_note
from opjit.progress import readable, tally
from opjit.recipe import toolchain
from opjit.store import layers
from opjit.store.store import Store, default_root, default_store
from opjit.wanted import target_of

OK = "ok"
NOTE = "note"
WARNING = "warning"
PROBLEM = "problem"
_COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", PROBLEM: "red"}
TIMEOUT = 50.0  # seconds for one op, which needs two to five
_ARCH = "sm_90"  # the arch of the CUDA op on a machine without a GPU
_OP = "tensor_negate"
_TO_SEE = f"OPJIT_VERBOSE=1 opjit get {_OP}, or your program with OPJIT_VERBOSE=1, shows the build"
_NAME = "opjit_doctor"
# For each extension, its C++ and its CUDA.
_PROGRAMS = {
    "C++ program": ("at::Tensor twice(at::Tensor x) { return x + x; }", ""),
    "CUDA program": (
        "at::Tensor twice(at::Tensor x);",
        """__global__ void add(float *x, long n)
        {
            if (threadIdx.x < n)
                x[threadIdx.x] += x[threadIdx.x];
        }
        at::Tensor twice(at::Tensor x)
        {
            add<<<1, 256>>>(x.data_ptr<float>(), x.numel());
            return x;
        }""",
    ),
}
_OLDEST_TORCH = "2.10"
_LOW_SPACE = 100 << 20  # bytes; building a CUDA op needs about ten million
_PASSWORD = "//[^/@]*@"  # in a URL


class Observation(NamedTuple):
    """One line of the report."""

    about: str
    state: str  # "ok"; "note" for information; "warning": ops work, but slowly or unsafely; "problem": ops cannot be built or loaded
    seen: str  # the observation of the check, in one line
    todo: str = ""  # what to do about a problem or a warning, in one line


def _from_error(about: str, error: Exception, todo: str) -> Observation:
    """Turn an error into a problem. In messages of opjit, the advice follows a semicolon."""
    lines = str(error).splitlines() or [type(error).__name__]
    if not isinstance(error, OpjitError):
        return Observation(about, PROBLEM, f"{type(error).__name__}: {lines[0]}", todo)
    seen, _, advice = lines[0].partition("; ")
    return Observation(about, PROBLEM, seen, advice or todo)


def versions() -> Iterator[Observation]:
    if note := busy_note():
        yield Observation("load", NOTE, note, "repeat it when other programs have ended")
    yield Observation(
        "opjit",
        OK,
        f"{opjit.__version__} in {Path(opjit.__file__).parent}, Python {platform.python_version()}",
    )
    if torch.__version__ < _OLDEST_TORCH:  # compares versions, not strings
        yield Observation(
            "torch",
            PROBLEM,
            f"torch {torch.__version__}: opjit needs {_OLDEST_TORCH} or later",
            f"pip install 'torch>={_OLDEST_TORCH}'",
        )
    else:
        yield Observation("torch", OK, f"{torch.__version__} in {Path(torch.__file__).parent}")
    cpu = backends.for_device("cpu")
    if missing := cpu.available():
        yield Observation("machine", PROBLEM, missing, "use an x86-64 or aarch64 machine")
    else:
        yield Observation(
            "machine", OK, f"{platform.machine()}, {cpu.host_arch()}, Linux {platform.release()}"
        )


def tools() -> Iterator[Observation]:
    try:
        compiler = toolchain.require_compiler(None)
        yield Observation(
            "C compiler", OK, f"{compiler.path}: {compiler.version}, for {compiler.machine}"
        )
    except (ToolMissing, OSError) as error:
        yield _from_error("C compiler", error, "set CC to a gcc or clang")


def c_op() -> Iterator[Observation]:
    yield _in_subprocess("C op", "cpu")


def gpus() -> Iterator[Observation]:
    missing = backends.for_device("cuda").available()
    if missing is None:
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Observation(
            "GPU",
            OK,
            f"{torch.cuda.device_count()} ({', '.join(sorted(names))}), {backends.for_device('cuda').host_arch()}",
        )
    elif os.path.exists("/dev/nvidiactl"):
        yield Observation(
            "GPU",
            WARNING,
            f"the machine has an NVIDIA driver, but {missing.partition(';')[0]}",
            "install a CUDA build of torch that this driver supports, and check CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Observation(
            "GPU",
            NOTE,
            f"none: {missing.partition(';')[0]}; CUDA ops can still be built for other machines",
        )


def cuda_op() -> Iterator[Observation]:
    """Check NVRTC and nvcc, and an op for this machine's GPU or, without one, for another machine's."""
    backend = backends.for_device("cuda")
    here = backend.available() is None
    nvrtc = toolchain.find_nvrtc(backend.runtime(None), None)
    if nvrtc is None:
        yield Observation(
            "NVRTC",
            NOTE,
            "not found, so nvcc compiles CUDA ops, which is 3x slower",
            toolchain.install_nvrtc(),
        )
    else:
        yield Observation("NVRTC", OK, f"CUDA {nvrtc.version.partition(' ')[0]}: {nvrtc.library}")
    try:
        nvcc = toolchain.find_nvcc(None)
    except (ToolMissing, OSError) as error:
        yield _from_error("nvcc", error, "put another nvcc on PATH, or set CUDA_HOME")
        return
    if nvcc is None and nvrtc is None:
        yield Observation(
            "nvcc",
            WARNING if here else NOTE,
            "not found, so CUDA ops cannot be built here; ops in a cache or a wheel still work",
            f"{toolchain.install_nvrtc()}, or install the CUDA Toolkit of torch's CUDA version",
        )
        return
    if nvcc is None:
        yield Observation(
            "nvcc",
            NOTE,
            "not found, so the few CUDA files that NVRTC does not support cannot be built",
            toolchain.install_nvcc(),
        )
    else:
        yield Observation("nvcc", OK, f"CUDA {nvcc.version} ({nvcc.build}) in {nvcc.root}")
    yield _in_subprocess("CUDA op", "cuda" if here else _ARCH)


def programs() -> Iterator[Observation]:
    """Check extensions, which opjit builds several times faster if the compilers accept its headers. Ops work without them."""
    for about in _PROGRAMS:
        if "CUDA" not in about or torch.version.cuda:
            found = _in_subprocess(about, "")
            yield found._replace(state=WARNING) if found.state == PROBLEM else found


def _in_subprocess(about: str, where: str) -> Observation:
    """Build and run an op in a subprocess, which may crash, with a separate cache on the user's filesystem, to find its limits."""
    if any(tool.state == PROBLEM for tool in tools()):
        return Observation(about, NOTE, "not tried, because a tool is missing")
    with _hidden_folder(nearest_existing(default_root())) as cache:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("OPJIT_")
        }
        environment["OPJIT_CACHE"] = cache
        limit = TIMEOUT
        if about in _PROGRAMS:
            environment["OPJIT_LAYERS"] = str(default_root())  # has parts that all programs need
            limit *= 4  # with torch's own headers, a program needs up to 70 s
        command = [
            sys.executable,
            "-c",
            f"from opjit import doctor; doctor.print_observation({about!r}, {where!r})",
        ]
        folder = Path(opjit.__file__).parents[1]
        done = processes.run_printing(command, limit=limit, env=environment, cwd=folder)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode == 0:
        return Observation(*json.loads(last))
    if last.startswith(processes.LATE):
        return Observation(
            about,
            PROBLEM,
            f"still compiling or running after {limit:.0f} s",
            _TO_SEE,
        )
    code = done.returncode
    ended = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
    return Observation(
        about,
        PROBLEM,
        f"the subprocess ended with {ended}: {last}",
        "if this names torch, reinstall torch; otherwise report a bug with the output of this command",
    )


def _hidden_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder in `parent`, or in the system's temporary folder if that cannot be."""
    make = partial(tempfile.TemporaryDirectory, prefix=".opjit-doctor-", ignore_cleanup_errors=True)
    try:
        return make(dir=parent)
    except OSError:
        return make()


def print_observation(about: str, where: str) -> None:
    """Print an observation of the op for a device, or for an architecture of another machine, as the subprocess's last line."""
    processes.end_with_commands()
    try:
        observation = (
            _built(about) if about in _PROGRAMS else Observation(about, OK, _build_and_call(where))
        )
    except Exception as error:
        observation = _from_error(about, error, _TO_SEE)
    print("\n" + json.dumps(observation))


def _build_and_call(where: str) -> str:
    """Build the op, and call it unless `where` is the arch that is not here."""
    started = time.perf_counter()
    if where == _ARCH:
        request.entry(registry.find(_OP), target_of("cuda", where))
        return f"built for {where} in {time.perf_counter() - started:.2f} s, but not run"
    negate = opjit.get(_OP, where)
    seconds = time.perf_counter() - started
    x = torch.arange(1000, dtype=torch.float32, device=where)
    if not torch.equal(negate(x), -x):
        raise OpjitError(
            "built and run, but the result is wrong; the compiler or the machine is at fault: set CC to another compiler"
        )
    return f"built in {seconds:.2f} s, loaded and run: the result is correct"


def _built(about: str) -> Observation:
    """Build and load an extension. It works with torch's own headers and with nvcc, but slowly."""
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    cpp, cuda = _PROGRAMS[about]
    started = time.perf_counter()
    opjit.load_inline(_NAME, cpp, cuda, functions="twice")
    seconds = time.perf_counter() - started
    [entry] = entries(_NAME, default_store())
    seen = f"built in {seconds:.1f} s with {entry.headers}"
    if not re.fullmatch("light headers(; [^,]*)?", entry.headers):  # another way has a reason
        return Observation(
            about, WARNING, seen, "change what the reason names; it slows each build"
        )
    return Observation(about, OK, seen)


def cache() -> Iterator[Observation]:
    """Check whether the cache's folder can be written, and by its user alone, and how much space is there."""
    root = default_root()
    place = nearest_existing(root)
    if not place.is_dir():
        yield Observation(
            "cache",
            WARNING,
            f"{place} is not a directory, so every process builds its ops again",
            "set OPJIT_CACHE to a directory that only you can write",
        )
        return
    yield Observation(
        "cache", OK, str(root) if place == root else f"{root}, to be created in {place}"
    )
    for problem in filter(None, (files.replacement_risk(root), *open_folders(Store(root).base))):
        seen, _, todo = problem.partition("; ")
        yield Observation(
            "cache",
            WARNING,
            f"{seen}, so opjit does not trust it, and every process builds its ops again",
            todo or "set OPJIT_CACHE to a directory that only you can write",
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".opjit-doctor-", dir=place) as folder:
            files.write_synced(Path(folder, "file"), os.urandom(1 << 20))
    except OSError as error:
        yield Observation(
            "cache",
            WARNING,
            f"{place} cannot be written ({error.strerror}), so no new op is kept there",
            "free some space there, or set OPJIT_CACHE to a directory on another filesystem",
        )
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    if free < _LOW_SPACE:
        yield Observation(
            "cache",
            WARNING,
            f"{free / 1e6:.1f} MB are free on its filesystem",
            "free some space: opjit cache clear removes every entry",
        )
    else:
        yield Observation("cache", OK, f"{free / 1e9:.1f} GB are free on its filesystem")


def open_folders(base: Path) -> Iterator[str]:
    """Yield a reason for each folder of a cache that another user can write."""
    folders = [base, *sorted(base.glob("*/"))] if base.exists() else []
    yield from filter(None, map(files.trust_problem, folders))


def nearest_existing(path: Path) -> Path:
    return next(filter(os.path.exists, (path, *path.parents)))


def remote() -> Iterator[Observation]:
    if not os.environ.get("OPJIT_REMOTE"):
        return
    from opjit.share import remote, trust
    from opjit.share.transport import Objects

    shown = Objects(os.environ["OPJIT_REMOTE"]).shown
    started = time.monotonic()
    trouble = remote.problem()
    if trouble is None:
        yield Observation("remote", OK, f"{shown} answers in {time.monotonic() - started:.2f} s")
    else:
        yield Observation(
            "remote",
            WARNING,
            f"{shown} cannot be used, so ops are built here: {trouble.splitlines()[0]}",
            "check OPJIT_REMOTE, OPJIT_TRUST and the network, or unset OPJIT_REMOTE",
        )
    if os.environ.get("OPJIT_TRUST") == trust.UNSIGNED:
        yield Observation(
            "remote",
            WARNING,
            "OPJIT_TRUST=unsigned: anyone who can write to the remote can run code here",
            "sign what you push (opjit keygen), and set OPJIT_TRUST to the public key",
        )


def variables() -> Iterator[Observation]:
    """Report the OPJIT_* variables that are set, misspelled ones included, and layers that are no caches."""
    for name, value in sorted(os.environ.items()):
        if not name.startswith("OPJIT_"):
            continue
        if name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            yield Observation(
                "environment",
                WARNING,
                f"{name} is set, but opjit does not read this variable",
                f"did you mean {close[0]}?"
                if close
                else f"unset it; the variables are {', '.join(VARIABLES)}",
            )
        elif name in SWITCHES and value.lower() in ("false", "no", "off"):
            yield Observation(
                "environment",
                WARNING,
                f"{name}={value} switches it on: only 0 and an empty value switch it off",
                f"set {name}=0",
            )
        else:
            yield Observation(
                "environment", OK, f"{name}={re.sub(_PASSWORD, '//…@', value)} ({VARIABLES[name]})"
            )
    for layer in layers.named():
        if not Store(layer).base.is_dir():  # a request goes on to the next layer without a word
            yield Observation(
                "environment",
                WARNING,
                f"{layer} in OPJIT_LAYERS is not a cache",
                "remove it from OPJIT_LAYERS, or mount it",
            )


CHECKS = (
    versions,
    tools,
    c_op,
    gpus,
    cuda_op,
    programs,
    cache,
    remote,
    variables,
)


def examine(before: Callable[[str], object] = lambda name: None) -> Iterator[Observation]:
    """Run every check, and yield its observations. `before` is called with the name of each check first.

    Example:
        >>> [observation for observation in opjit.doctor.examine() if observation.state == "problem"]
        []
    """
    for check in CHECKS:
        before(check.__name__)
        try:
            yield from check()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            yield Observation(
                check.__name__,
                WARNING,
                f"this check failed: {type(error).__name__}: {error} ({where.name})",
                "check it by hand; if the machine is not at fault, report a bug",
            )


def show(print_json: Callable[[object], None] | None = None) -> int:
    """Run every check, and print a report or, by `print_json`, the observations. Returns the exit code: 1 if there is a problem."""
    found = []
    with warnings.catch_warnings(), Console(stderr=True).status("checking") as status:
        warnings.simplefilter("ignore")  # the checks report the reasons of torch's warnings
        for observation in examine(lambda name: status.update(f"checking: {name}")):
            found.append(observation)
            if print_json is None:
                _print(observation)
    states = [observation.state for observation in found]
    if print_json is not None:
        print_json([observation._asdict() for observation in found])
    else:
        click.echo(", ".join(tally(states.count(state), state) for state in (PROBLEM, WARNING)))
    return int(PROBLEM in states)


def _print(observation: Observation) -> None:
    """Print an observation in 80 columns, with the state in color."""
    state = f"{observation.state:<8}"
    text = readable(f"{state} {observation.about}: {observation.seen}")
    click.echo(click.style(state, _COLOURS[observation.state]) + text.removeprefix(state))
    if observation.todo:
        click.echo(readable(f"{'':<8} do: {observation.todo}"))

"""Checks of the machine, of torch, and of environment variables."""

from __future__ import annotations

import difflib
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

import opjit
from opjit import backends, files
from opjit.backends import targets
from opjit.doctor.report import NOTE, OK, PROBLEM, WARNING, Observation
from opjit.environment import SWITCHES, VARIABLES
from opjit.errors import OpjitError
from opjit.store import inventory
from opjit.store.store import Store

_OLDEST_TORCH = "2.10"
_RELATIVE = "is relative, so it depends on the folder in which a process starts"
_USE_ABSOLUTE = "set an absolute path"
_PASSWORD = re.compile("//[^/@]*@")  # in a URL


def versions() -> Iterator[Observation]:
    """Check Python, torch, the CPU and the C library."""
    where = Path(opjit.__file__).parent
    yield Observation("opjit", OK, f"{opjit.__version__} in {where}, Python {platform.python_version()}")
    torchs, oldest = (tuple(map(int, version.split(".")[:2])) for version in (torch.__version__, _OLDEST_TORCH))
    if torchs < oldest:
        yield Observation("torch", PROBLEM, f"torch {torch.__version__}: opjit needs {_OLDEST_TORCH} or later",
                          f"pip install 'torch>={_OLDEST_TORCH}'")
    else:
        yield Observation("torch", OK, f"{torch.__version__} in {Path(torch.__file__).parent}")
    cpu = backends.for_device("cpu")
    missing = cpu.available()
    if missing:
        yield Observation("machine", PROBLEM, missing, "use an x86-64 or aarch64 machine")
    else:
        yield Observation("machine", OK, f"{platform.machine()}, {cpu.host_arch()}, Linux {platform.release()}")
    libc = None
    with suppress(ValueError, OSError):
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    if libc:
        yield Observation("C library", OK, libc)
    else:
        yield Observation("C library", PROBLEM, "it is not glibc, and ops link against glibc", "use a distribution with glibc (not Alpine)")


def gpus() -> Iterator[Observation]:
    """Check the GPUs that torch can use."""
    missing = backends.for_device("cuda").available()
    if missing is None:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Observation("GPU", OK, f"{len(names)} ({', '.join(sorted(set(names)))}), {backends.for_device('cuda').host_arch()}")
    elif os.path.exists("/dev/nvidiactl"):
        yield Observation("GPU", WARNING, f"the machine has an NVIDIA driver, but {missing.partition(';')[0]}",
                          "install a CUDA build of torch that this driver supports, and check CUDA_VISIBLE_DEVICES")
    else:
        yield Observation("GPU", NOTE, f"none: {missing.partition(';')[0]}; CUDA ops can still be built for other machines")


def variables() -> Iterator[Observation]:
    """Report the OPJIT_* variables that are set, misspelled ones included."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("OPJIT_")}
    for name, value in given.items():
        if name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            yield Observation("environment", WARNING, f"{name} is set, but opjit reads no such variable",
                              f"did you mean {close[0]}?" if close else f"unset it; the variables are {', '.join(VARIABLES)}")
        elif name in SWITCHES and value.lower() in ("false", "no", "off", "n", "f"):
            yield Observation("environment", WARNING, f"{name}={value} switches it on: only 0 and an empty value switch it off",
                              f"set {name}=0")
        else:
            yield Observation("environment", OK, f"{name}={_PASSWORD.sub('//…@', value)} ({VARIABLES[name]})")
    if not given:
        yield Observation("environment", OK, "no OPJIT_ variable is set")
    yield from _arch(given.get("OPJIT_ARCH", ""))
    yield from _op_folders(given.get("OPJIT_PATH", ""))
    cache = given.get("OPJIT_CACHE", "")
    if cache and not os.path.isabs(os.path.expanduser(cache)):
        yield Observation("environment", WARNING, f"OPJIT_CACHE={cache} {_RELATIVE}", _USE_ABSOLUTE)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and not os.access(f"{home}/bin/nvcc", os.X_OK):
        yield Observation("environment", WARNING, f"CUDA_HOME is {home}, which has no executable bin/nvcc",
                          "point it at a CUDA Toolkit, or unset it")


def _arch(arch: str) -> Iterator[Observation]:
    if not arch:
        return
    try:
        backend = targets.named(arch).backend
    except OpjitError as error:
        unknown, _, known = str(error).partition("; ")
        yield Observation("environment", PROBLEM, f"OPJIT_ARCH={arch}: {unknown}", f"unset it, or set another; {known}")
        return
    if backend.available() is None and not backend.runs(arch):
        yield Observation("environment", PROBLEM, f"OPJIT_ARCH={arch}, but this machine ({backend.host_arch()}) cannot run such binaries",
                          "unset it; opjit get OP --arch builds for another machine")


def _op_folders(paths: str) -> Iterator[Observation]:
    for path in filter(None, paths.split(os.pathsep)):
        folder = Path(os.path.expanduser(path))
        if not folder.is_absolute():
            seen = "is not an absolute path"
        elif not folder.is_dir():
            seen = "is not a folder"
        else:
            seen = files.distrusted(folder.resolve()) or ""
        if seen:
            yield Observation("environment", PROBLEM, f"OPJIT_PATH names {path}: {seen.partition(';')[0]}, so opjit does not run its ops",
                              "name the absolute path of an op's folder, or of a folder of op folders, that belongs to you or root")


def remote() -> Iterator[Observation]:
    """Check whether the remote in OPJIT_REMOTE answers."""
    if not os.environ.get("OPJIT_REMOTE"):
        return
    from opjit.share import remote, trust
    from opjit.share.transport import Objects

    shown, started = Objects(os.environ["OPJIT_REMOTE"]).shown, time.monotonic()
    trouble = remote.problem()
    if trouble is None:
        yield Observation("remote", OK, f"{shown} answers in {time.monotonic() - started:.2f} s")
    else:
        yield Observation("remote", WARNING, f"{shown} cannot be used, so ops are built here: {trouble.splitlines()[0]}",
                          "check OPJIT_REMOTE, OPJIT_TRUST and the network, or unset OPJIT_REMOTE")
    if os.environ.get("OPJIT_TRUST") == trust.UNSIGNED:
        yield Observation("remote", WARNING, "OPJIT_TRUST=unsigned: anyone who can write to the remote can run code here",
                          "sign what you push (opjit keygen), and set OPJIT_TRUST to the public key")


def layers() -> Iterator[Observation]:
    """Check the caches in OPJIT_LAYERS."""
    for layer in filter(None, os.environ.get("OPJIT_LAYERS", "").split(os.pathsep)):
        base = Store(Path(os.path.abspath(os.path.expanduser(layer)))).base
        if not os.path.isabs(os.path.expanduser(layer)):
            yield Observation("layer", WARNING, f"{layer} {_RELATIVE}", _USE_ABSOLUTE)
        if not base.is_dir():
            yield Observation("layer", WARNING, f"{layer} is not a cache: there is no {base}", "remove it from OPJIT_LAYERS, or mount it")
            continue
        if not os.access(base, os.R_OK | os.X_OK):
            yield Observation("layer", WARNING, f"{layer} cannot be read", "ask its owner for read access")
            continue
        problem = files.swappable(base.parent) or files.distrusted(base)
        if problem:
            yield Observation("layer", WARNING, problem.partition(";")[0],
                              "remove it from OPJIT_LAYERS, or let only root or you write to it")
        else:
            count = sum(1 for _ in inventory.scan(Store(base.parent)))
            yield Observation("layer", OK if count else NOTE, f"{layer}: {count} entr{'y' if count == 1 else 'ies'}")

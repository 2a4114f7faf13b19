"""What opjit runs on, and what the environment tells it."""

from __future__ import annotations

import difflib
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import opjit
from opjit import backends, files, targets
from opjit.doctor.finding import NOTE, OK, PROBLEM, WARNING, Finding
from opjit.environment import SWITCHES, VARIABLES
from opjit.errors import OpjitError
from opjit.store import Store

_FLOOR = (2, 10)  # of torch
_PASSWORD = re.compile("//[^/@]*@")  # in an address


def versions() -> Iterator[Finding]:
    """Python, torch, the machine and its C library."""
    where = Path(opjit.__file__).parent
    yield Finding("opjit", OK, f"{opjit.__version__} in {where}, Python {platform.python_version()}")
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or (int(found[1]), int(found[2])) < _FLOOR:
        yield Finding("torch", PROBLEM, f"torch {torch.__version__}: opjit needs {'.'.join(map(str, _FLOOR))} or later",
                      f"pip install 'torch>={'.'.join(map(str, _FLOOR))}'")
    else:
        yield Finding("torch", OK, f"{torch.__version__} in {Path(torch.__file__).parent}")
    cpu = backends.for_device("cpu")
    missing = cpu.available()
    if missing:
        yield Finding("machine", PROBLEM, missing, "use a machine with one of these")
    else:
        yield Finding("machine", OK, f"{platform.machine()}, {cpu.host_arch()}, Linux {platform.release()}")
    yield _libc()


def _libc() -> Finding:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        version = None
    if not version:
        return Finding("C library", PROBLEM, "it is not glibc, which ops are linked with", "use a distribution with glibc (not Alpine)")
    return Finding("C library", OK, version)


def gpus() -> Iterator[Finding]:
    """The GPUs that torch can use."""
    missing = backends.for_device("cuda").available()
    if missing is None:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("GPU", OK, f"{len(names)} ({', '.join(sorted(set(names)))}), {backends.for_device('cuda').host_arch()}")
    elif os.path.exists("/dev/nvidiactl"):
        yield Finding("GPU", WARNING, f"the machine has an NVIDIA driver, but {missing.partition(';')[0]}",
                      "install a CUDA build of torch that the driver is new enough for, and look at CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("GPU", NOTE, f"none: {missing.partition(';')[0]}; CUDA ops can be built for another machine")


def variables() -> Iterator[Finding]:
    """The OPJIT_* variables that are set, and those that nobody reads."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("OPJIT_")}
    for name, value in given.items():
        if name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            yield Finding("environment", WARNING, f"{name} is set, and no such variable is read",
                          f"did you mean {close[0]}?" if close else f"unset it; there are {', '.join(VARIABLES)}")
        elif name in SWITCHES and value.lower() in ("false", "no", "off", "n", "f"):
            yield Finding("environment", WARNING, f"{name}={value} switches it on: only 0 and an empty value are off", f"set {name}=0")
        else:
            yield Finding("environment", OK, f"{name}={_PASSWORD.sub('//…@', value)} ({VARIABLES[name]})")
    if not given:
        yield Finding("environment", OK, "no OPJIT_ variable is set")
    yield from _arch(given.get("OPJIT_ARCH", ""))
    yield from _own_ops(given.get("OPJIT_PATH", ""))
    configured = given.get("OPJIT_CACHE", "")
    if configured and not os.path.isabs(os.path.expanduser(configured)):
        yield Finding("environment", WARNING, f"OPJIT_CACHE={configured} is another folder wherever a process starts",
                      "name it by its absolute path")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and not os.access(f"{home}/bin/nvcc", os.X_OK):
        yield Finding("environment", WARNING, f"CUDA_HOME is {home}, which has no bin/nvcc that can be run",
                      "point it at a CUDA Toolkit, or unset it")


def _arch(arch: str) -> Iterator[Finding]:
    if not arch:
        return
    try:
        backend = targets.named(arch).backend
    except OpjitError as error:
        unknown, _, known = str(error).partition("; ")
        yield Finding("environment", PROBLEM, f"OPJIT_ARCH={arch}: {unknown}", f"unset it, or set it to one that is {known}")
        return
    if backend.available() is None and not backend.runs(arch):
        yield Finding("environment", PROBLEM, f"OPJIT_ARCH={arch}, and this machine ({backend.host_arch()}) cannot run what is built so",
                      "unset it; opjit get OP --arch builds for another machine")


def _own_ops(paths: str) -> Iterator[Finding]:
    for path in filter(None, paths.split(os.pathsep)):
        folder = Path(os.path.expanduser(path))
        if not folder.is_absolute():
            seen = "is not an absolute path"
        elif not folder.is_dir():
            seen = "is no folder"
        else:
            seen = files.distrusted(folder.resolve()) or ""
        if seen:
            yield Finding("environment", PROBLEM, f"OPJIT_PATH names {path}: {seen.partition(';')[0]}, so the ops in it are not found",
                          "name an op's folder, or a folder of such, that is yours or root's, by its absolute path")


def remote() -> Iterator[Finding]:
    """Whether the remote that OPJIT_REMOTE names answers."""
    if not os.environ.get("OPJIT_REMOTE"):
        return
    from opjit import remote, trust
    from opjit.objects import Objects

    shown, started = Objects(os.environ["OPJIT_REMOTE"]).shown, time.monotonic()
    trouble = remote.trouble()
    if trouble is None:
        yield Finding("remote", OK, f"{shown} answers in {time.monotonic() - started:.2f} s")
    else:
        yield Finding("remote", WARNING, f"{shown} gives nothing, so ops are built here: {trouble.splitlines()[0]}",
                      "look at OPJIT_REMOTE, OPJIT_TRUST and the network, or unset OPJIT_REMOTE")
    if os.environ.get("OPJIT_TRUST") == trust.UNSIGNED:
        yield Finding("remote", WARNING, "OPJIT_TRUST=unsigned: whoever can write there decides what is run here",
                      "sign what is pushed (opjit keygen), and name the public key")


def layers() -> Iterator[Finding]:
    """The caches that OPJIT_LAYERS names."""
    for layer in filter(None, os.environ.get("OPJIT_LAYERS", "").split(os.pathsep)):
        base = Store(Path(os.path.abspath(os.path.expanduser(layer)))).base
        if not os.path.isabs(os.path.expanduser(layer)):
            yield Finding("layer", WARNING, f"{layer} is another folder wherever a process starts", "name it by its absolute path")
        if not base.is_dir():
            yield Finding("layer", WARNING, f"{layer} is no cache: there is no {base}", "take it out of OPJIT_LAYERS, or mount it")
            continue
        if not os.access(base, os.R_OK | os.X_OK):
            yield Finding("layer", WARNING, f"{layer} cannot be read", "ask its owner for read access")
            continue
        problem = files.swappable(base.parent) or files.distrusted(base)
        if problem:
            yield Finding("layer", WARNING, problem.partition(";")[0], "take it out of OPJIT_LAYERS, or let only root or you write it")
        else:
            count = sum(1 for _ in Store(base.parent).entries())
            yield Finding("layer", OK if count else NOTE, f"{layer}: {count} entries")

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
from opjit import backends
from opjit.doctor.report import NOTE, OK, PROBLEM, WARNING, Observation
from opjit.environment import SWITCHES, VARIABLES
from opjit.store import layers
from opjit.store.store import Store

_OLDEST_TORCH = "2.10"
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
    cache = given.get("OPJIT_CACHE", "")
    if cache and not os.path.isabs(os.path.expanduser(cache)):
        yield Observation("environment", WARNING, f"OPJIT_CACHE={cache} is relative, so it depends on the folder in which a process starts",
                          "set an absolute path")
    for layer in layers.named():
        if not Store(layer).base.is_dir():  # a request goes on to the next layer without a word
            yield Observation("environment", WARNING, f"{layer} in OPJIT_LAYERS is not a cache", "remove it from OPJIT_LAYERS, or mount it")


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

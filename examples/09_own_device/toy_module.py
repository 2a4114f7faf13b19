"""``torch.toy``, the module that torch expects for a device. Names and signatures are the same as in torch.cuda."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

SDK = Path(__file__).resolve().parent / "sdk"
# Only C++ can add a Generator for a new device to torch, so the numbers of this device come from a CPU generator.
default_generators = (torch.Generator(),)


@cache
def library() -> str:
    """Return the path of the runtime, libtoy.so. A vendor's SDK contains the compiled file."""
    folder = tempfile.mkdtemp(prefix="toy-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/libtoy.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wl,-soname,libtoy.so", "-o", path, "toy.c"], cwd=SDK, check=True)
    return path


@cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(library())


class Stream(ctypes.Structure):
    """A stream of the runtime, declared in toy.h."""

    _fields_ = (("device", ctypes.c_int32), ("launches", ctypes.c_int64))


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: torch.device | str | int) -> None:
    """There is one device, because a guard for several devices must be written in C++."""


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Do nothing, because kernels are done when their launch returns."""


def current_stream(device: torch.device | str | int | None = None) -> Stream:
    found = ctypes.POINTER(Stream)()
    _runtime().toy_current_stream(current_device(), ctypes.byref(found))
    return found.contents


def new_stream() -> Stream:
    made = ctypes.POINTER(Stream)()
    _runtime().toy_stream_create(current_device(), ctypes.byref(made))
    return made.contents


@contextmanager
def stream(of: Stream) -> Iterator[None]:
    """Launch kernels on a stream."""
    before = current_stream()
    _runtime().toy_set_stream(ctypes.byref(of))
    try:
        yield
    finally:
        _runtime().toy_set_stream(ctypes.byref(before))


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Called by torch.manual_seed."""
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device: torch.device | str | int = "toy") -> torch.Tensor:
    return default_generators[current_device()].get_state()


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int = "toy") -> None:
    default_generators[current_device()].set_state(new_state)


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Called by torch.autocast."""
    return [torch.bfloat16, torch.float16]

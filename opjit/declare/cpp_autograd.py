"""Autograd without Python for a call that needs no derivative or that another op differentiates: kernels_c/opjit_autograd.cpp.

`opjit precompile` compiles it once for a torch, which costs 13 seconds of a CPU for torch's headers. It has an entry like a C++ extension,
so layers and remotes share it. An op uses it, if a cache has it, when a device's kernel is loaded. The kernel in Python, which serves
without it, costs a call 5 us more, and a recorded call 12 us more (tests/benchmarks/call.py)."""

import array
import ctypes
import functools
import importlib.machinery
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from opjit import files, loader, processes, resources
from opjit.declare.gradient_op import GradientOp
from opjit.environment import is_on
from opjit.errors import LoadError
from opjit.store import layers, store
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_store

NAME = "opjit_autograd"
_library: ctypes.CDLL | None = None
_lock = processes.Lock()


def source() -> Path:
    return resources.folder("kernels_c") / f"{NAME}.cpp"


@functools.cache
def _expected() -> tuple[object, ...]:
    """Return the fields that the document of its entry has, whichever compiler made it."""
    build = (str(torch.__version__), torch.version.git_version, torch.version.cuda)
    inputs = {source().name: files.digest(str(source()))}
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    return inputs, suffix, [*build, bool(torch._C._GLIBCXX_USE_CXX11_ABI)]


def _fits_here(manifest: Manifest) -> bool:
    document = manifest.document
    suffix = document.get("python", [""])[0]
    return (document.get("known"), suffix, document.get("torch")) == _expected()


def find_entry() -> Entry | None:
    """Return its entry, from a layer or the cache."""
    for root in [*map(Store, layers.named()), default_store()]:
        place = root.base / f"cpp_extension.{NAME}"
        archs = sorted(os.listdir(place)) if place.is_dir() else []
        for folder in (place / arch for arch in archs if f"-torch{torch.__version__}-" in arch):
            if root.trusted(place, folder):
                entry = store.first(folder, None, _fits_here)
                if entry is not None:
                    return entry
    return None


def bind(schema: str, key: str, backward: object) -> Callable[[], None] | None:
    """Give an op the kernel at a key of autograd, if a cache has it. Returns a function that removes it."""
    library = _open_library() if is_on("OPJIT_CPP_AUTOGRAD", unset=True) else None
    if library is None:
        return None
    rule: tuple[object, ...] = (None, None, None)
    if isinstance(backward, GradientOp):
        places = array.array("q", backward.places).tobytes()
        targets = array.array("q", backward.targets).tobytes()
        rule = (backward.schema.text.encode(), places, targets)
    bound = library.opjit_autograd_bind(schema.encode(), key.encode(), *rule)
    return None if bound is None else functools.partial(library.opjit_autograd_unbind, bound)


def _open_library() -> ctypes.CDLL | None:
    global _library
    with _lock:
        entry = find_entry() if _library is None else None
        if entry is not None:
            with suppress(LoadError, OSError), loader.pinned(entry) as path:
                library = ctypes.CDLL(path)
                loader.name_as(library, entry.library)
                library.opjit_autograd_bind.restype = ctypes.c_void_p
                library.opjit_autograd_unbind.argtypes = (ctypes.c_void_p,)
                _library = library
        return _library

"""Autograd without Python for a call that needs no derivative: a kernel in C++, kernels_c/opjit_autograd.cpp, compiled once for a torch.
It has an entry like a C++ extension, so layers and remotes share it. An op uses it, if a cache has it, when a device's kernel is loaded.
Until then the kernel in Python serves, which costs a call some microseconds."""

import ctypes
import functools
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from opjit import files, loader, processes, progress, resources
from opjit.environment import is_on
from opjit.errors import LoadError, ToolMissing
from opjit.recipe import toolchain
from opjit.store import layers, store
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_store

NAME = "opjit_autograd"
# Calls of an op with a backward cost 5 us less with it (tests/benchmarks/call.py), but a compiler needs seconds for it. So a shell starts a
# build of the lowest priority that outlives this process and that nobody waits for; `opjit cache ls` then shows its entry.
_START_BUILD = 'nice -n 19 "$0" -c "$@" >/dev/null 2>&1 </dev/null &'
_BUILD = "import sys; sys.path[:] = sys.argv[1:]; from opjit.cpp_extension import autograd_part; autograd_part.make()"
_library: ctypes.CDLL | None = None
_started = False  # whether this process has started a build
_lock = processes.Lock()


def source() -> Path:
    return resources.folder("kernels_c") / f"{NAME}.cpp"


@functools.cache
def _expected() -> tuple[Any, ...]:
    """Return the fields that the document of its entry has, whichever compiler made it."""
    of_torch = [
        str(torch.__version__),
        torch.version.git_version,
        torch.version.cuda,
        bool(torch._C._GLIBCXX_USE_CXX11_ABI),
    ]
    inputs = {source().name: files.digest(str(source()))}
    return inputs, importlib.machinery.EXTENSION_SUFFIXES[0], of_torch


def _fits_here(manifest: Manifest) -> bool:
    document = manifest.document
    suffix = document.get("python", [""])[0]
    return (document.get("known"), suffix, document.get("torch")) == _expected()


def find_entry() -> Entry | None:
    """Return its entry, from a layer or the cache."""
    for root in [*map(Store, layers.named()), default_store()]:
        archs = (root.base / f"cpp_extension.{NAME}").glob(f"*-torch{torch.__version__}-*")
        for folder in sorted(archs):
            if root.trusted(folder.parent, folder):
                entry = store.first(folder, None, _fits_here)
                if entry is not None:
                    return entry
    return None


def bind(qualified: str, key: str) -> Callable[[], None] | None:
    """Give an op the kernel at a key of autograd, if a cache has it. Returns a function that removes it."""
    library = _open_library() if is_on("OPJIT_CPP_AUTOGRAD", unset=True) else None
    if library is None:
        return None
    bound = library.opjit_autograd_bind(qualified.encode(), key.encode())
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


def make_later(root: Store) -> None:
    """Compile or fetch it in the background, once per process, for later processes; never retry after a compile error."""
    global _started
    if _started or not is_on("OPJIT_CPP_AUTOGRAD", unset=True) or is_on("OPJIT_OFFLINE"):
        return
    _started = True
    with suppress(OSError, ToolMissing):
        if not sys.executable or find_entry() is not None or refused(root):
            return
        if os.environ.get("OPJIT_REMOTE") or toolchain.find_cxx(root.notes):
            progress.log("autograd's kernel in C++ is being built in the background")
            shell = ["/bin/sh", "-c", _START_BUILD, sys.executable, _BUILD]
            shell += map(os.path.abspath, sys.path)
            processes.run(shell, cwd=os.sep, start_new_session=True)


def refused(root: Store, error: Exception | None = None) -> bool:
    """Return whether this compiler refused it, which an `error` notes. Raises ToolMissing if the environment names no compiler."""
    note = root.base / "toolchain" / NAME
    tried = json.dumps([_expected(), toolchain.find_cxx(root.notes)])
    if error is not None:
        files.write_checked(note, tried)
    return files.read_checked(note) == tried

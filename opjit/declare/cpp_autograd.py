"""Autograd without Python for a call that needs no derivative: a kernel in C++, kernels_c/opjit_autograd.cpp, compiled once for a torch.
Its entry is that of a C++ extension, so layers and remotes share it. An op takes it, if a cache has it, when a device's kernel is loaded.
Until then the kernel in Python serves, which costs a call some microseconds."""

import ctypes
import functools
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from opjit import files, loader, processes, resources
from opjit.environment import is_on
from opjit.errors import LoadError, ToolMissing
from opjit.recipe import toolchain
from opjit.store import layers, store
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root

NAME = "opjit_autograd"
# A process of its own compiles it, for some seconds and with the lowest priority, also when this one has ended.
_LATER = 'nice -n 19 "$0" -c "$@" >/dev/null 2>&1 </dev/null &'
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from opjit.cpp_extension import autograd_part; autograd_part.make()"
_state: dict[
    str, Any
] = {}  # the library, once it is loaded; and whether this process has started a build
_lock = processes.Lock()


def source() -> Path:
    return resources.folder("kernels_c") / f"{NAME}.cpp"


@functools.cache
def _wanted() -> list[Any]:
    """What the document of its entry says, whichever compiler made it."""
    return [
        {source().name: files.digest(str(source()))},
        importlib.machinery.EXTENSION_SUFFIXES[0],
        [
            str(torch.__version__),
            torch.version.git_version,
            torch.version.cuda,
            bool(torch._C._GLIBCXX_USE_CXX11_ABI),
        ],
    ]


def find() -> Entry | None:
    """Return its entry, from a layer or the cache."""

    def fits(document: Mapping[str, Any]) -> bool:
        return [
            document.get("known"),
            document.get("python", [""])[0],
            document.get("torch"),
        ] == _wanted()

    for root in [*map(Store, layers.named()), Store(default_root())]:
        for folder in sorted(
            (root.base / f"cpp_extension.{NAME}").glob(f"*-torch{torch.__version__}-*")
        ):
            found = store.first(folder, None, fits) if root.trusted(folder.parent, folder) else None
            if found is not None:
                return found
    return None


def bind(qualified: str, key: str) -> Callable[[], None] | None:
    """Give an op the kernel at a key of autograd, if a cache has it. Returns what takes it back."""
    library = _library() if is_on("OPJIT_CPP_AUTOGRAD", unset=True) else None
    bound = (
        None if library is None else library.opjit_autograd_bind(qualified.encode(), key.encode())
    )
    return (
        None
        if library is None or bound is None
        else functools.partial(library.opjit_autograd_unbind, bound)
    )


def _library() -> ctypes.CDLL | None:
    with _lock:
        if "library" not in _state and (entry := find()) is not None:
            with suppress(LoadError, OSError), loader.pinned(entry) as path:
                library = ctypes.CDLL(path)
                loader.name_as(library, entry.library)
                library.opjit_autograd_bind.restype, library.opjit_autograd_unbind.argtypes = (
                    ctypes.c_void_p,
                    (ctypes.c_void_p,),
                )
                _state["library"] = library
        return _state.get("library")


def make_later(root: Store) -> None:
    """Have it compiled, or fetched from the remote, for later processes: once for a process, and not again after a compiler's error."""
    if not is_on("OPJIT_CPP_AUTOGRAD", unset=True) or "started" in _state or is_on("OPJIT_OFFLINE"):
        return
    _state["started"] = True
    with suppress(OSError, ToolMissing):
        if (
            sys.executable
            and find() is None
            and not refused(root)
            and (os.environ.get("OPJIT_REMOTE") or toolchain.find_cxx(root.notes))
        ):
            processes.run(
                ["/bin/sh", "-c", _LATER, sys.executable, _CODE, *map(os.path.abspath, sys.path)],
                cwd=os.sep,
                start_new_session=True,
            )


def refused(root: Store, error: Exception | None = None) -> bool:
    """Whether this compiler refused it, which an `error` notes. Raises ToolMissing if the environment names none."""
    note, tried = (
        root.base / "toolchain" / NAME,
        json.dumps([_wanted(), toolchain.find_cxx(root.notes)]),
    )
    if error is not None:
        files.write_note(note, tried)
    return files.stamp(note) is not None and files.read_regular(note).decode() == tried

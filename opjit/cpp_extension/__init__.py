"""torch.utils.cpp_extension with opjit's cache: the same functions, with the same arguments and results.

    >>> from opjit import cpp_extension                     # instead of: from torch.utils import cpp_extension
    >>> module = cpp_extension.load("ext", ["ext.cpp"])

For code that one cannot edit, `patched` and the command `opjit run` put them in the place of torch's. A setup.py takes BuildExtension.

The same content is built once: other processes, users and machines with the cache load it without a compiler and without importing
torch's builder. All other names are torch's own.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from opjit import builder, loader, progress
from opjit.cpp_extension import binary, static_init
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.binary import ExtensionBinary
from opjit.cpp_extension.identity import Unsupported
from opjit.shared_library.recorded import note_call
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root

__all__ = ["load", "load_inline", "patched"]

_opened: dict[
    str, set[tuple[int, int]]
] = {}  # by name: the device and inode of the libraries that this process has opened


def load(
    name: str,
    sources: str | list[str],
    extra_cflags: list[str] | None = None,
    extra_cuda_cflags: list[str] | None = None,
    extra_sycl_cflags: list[str] | None = None,
    extra_ldflags: list[str] | None = None,
    extra_include_paths: list[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
    *,
    fast: bool = True,
    **newer: Any,
) -> Any:
    """torch.utils.cpp_extension.load with opjit's cache.

    The arguments mean the same as torch's. The differences are:

    - The key of a binary is content: sources, headers, flags, static libraries, the versions of torch, Python, CUDA and the compilers,
      and the CUDA archs. A changed header leads to a new build, even if the process has the extension loaded. Touched files and moved
      checkouts do not.
    - The CUDA archs come from TORCH_CUDA_ARCH_LIST, else from OPJIT_ARCH, else from the visible GPUs. A build needs no GPU.
    - Of several processes that request an extension at once, one builds. If it is killed, another takes over.
    - build_directory receives the binary under torch's name, build.ninja and the inline sources, each by one rename. The loaded binary is
      the cache's, unless its run path has $ORIGIN. keep_intermediates matters for ROCm only. Without build_directory, a relative -L and
      $ORIGIN find nothing, as torch's default folder is not used.
    - An edit compiles the sources that it changes: the cache keeps the object files of an extension with several.
    - An extension for torch's stable ABI is one binary for every torch from its TORCH_TARGET_VERSION on, if it imports nothing else.
    - The order of sources does not matter: they are compiled and linked in the order of their paths.
    - In one process, changed content is another module, as with torch, but it is called NAME, too, and not NAME_v1.
    - A library whose static initialisers would end the process raises a LoadError; a forked child opens it first.
    - A C++ program is compiled with light headers: those of torch's own that its names need, in a tenth of the time of torch/extension.h;
      one that does not compile with them, with torch/extension.h. `opjit why NAME` shows which and why. `fast=False` or OPJIT_FAST=0
      always takes torch/extension.h.
    - OPJIT_LAYERS, OPJIT_REMOTE, `opjit cache push` and `pull` serve extensions as they do ops. A binary is found where
      torch, Python and all content of the key are equal; where no compiler is installed, any compiler's binary is.
    - `opjit record` lists extensions, `opjit precompile --extensions` builds them ahead, and `opjit.distributed.load` once in a job.
    - ROCm and SYCL builds, programs (``is_standalone=True``), and arguments of unexpected types, go to torch unchanged.

    Args:
        fast: whether light headers may be tried.
        newer: arguments of later versions of torch, which are passed on.

    Returns:
        The module; with ``is_python_module=False`` the path of the loaded library; with ``is_standalone=True`` the path of the
        program.

    Raises:
        ToolMissing, CompileError, BuildError, UnknownArch, LoadError: see `opjit.errors`; all are RuntimeErrors.

    Example:
        >>> module = opjit.load("ext", ["ext.cpp"], extra_cflags=["-O2"])
        >>> module.twice(torch.ones(1))
        tensor([2.])
    """
    return _load_call(LoadCall(**locals()))


def load_inline(
    name: str,
    cpp_sources: str | list[str],
    cuda_sources: str | list[str] | None = None,
    sycl_sources: str | list[str] | None = None,
    functions: str | list[str] | dict[str, str] | None = None,
    extra_cflags: list[str] | None = None,
    extra_cuda_cflags: list[str] | None = None,
    extra_sycl_cflags: list[str] | None = None,
    extra_ldflags: list[str] | None = None,
    extra_include_paths: list[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,
    use_pch: bool = False,
    no_implicit_headers: bool = False,
    *,
    fast: bool = True,
    **newer: Any,
) -> Any:
    """torch.utils.cpp_extension.load_inline with opjit's cache; see `load` for the differences. `use_pch` changes nothing: torch writes a
    precompiled header of 749 MB into its own folder, which takes longer than most builds.

    Example:
        >>> source = "at::Tensor twice(at::Tensor x) { return x + x; }"
        >>> opjit.load_inline("ext", source, functions="twice").twice(torch.ones(1))
        tensor([2.])
    """
    return _load_call(InlineCall(**locals()))


@contextmanager
def patched() -> Iterator[None]:
    """During the block, make torch.utils.cpp_extension's load and load_inline opjit's, in all threads: for code that one cannot edit.

    A name that was imported from torch's module before the block stays torch's. `opjit run program.py` does the same for a whole program
    and its children, with BuildExtension, too.

    Example:
        >>> with opjit.cpp_extension.patched():
        ...     import some_package     # it calls torch.utils.cpp_extension.load
    """
    from opjit.builder import torch_builder

    names = vars(torch_builder.torch_module())
    before = {name: names[name] for name in ("load", "load_inline")}
    names.update(load=load, load_inline=load_inline)
    try:
        yield
    finally:
        names.update(before)


def run_program(words: Sequence[str]) -> NoReturn:
    """Become ``python WORDS`` with opjit's functions in torch's module, for `opjit run`, and in children; see site/sitecustomize.py."""
    path = [str(Path(__file__).parent / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    sys.stdout.flush()
    os.execve(
        sys.executable,
        [sys.executable, *words],
        {**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )


def __getattr__(name: str) -> Any:
    """Return opjit's BuildExtension, or another name of torch's module: include_paths, CUDAExtension, CUDA_HOME, …"""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "BuildExtension":
        from opjit.cpp_extension import build_ext

        return build_ext.BuildExtension
    from opjit.builder import torch_builder

    return getattr(torch_builder.torch_module(), name)


def _load_call(call: LoadCall | InlineCall) -> Any:
    if hasattr(
        builder.torch_call, "names"
    ):  # the program put this function in torch's place, and a build calls torch's
        return builder.torch_call.names[call.function](**call.for_torch())
    try:
        wanted = binary.of_call(call, Store(default_root()).notes)
    except Unsupported:
        return load_by_torch(call)
    return load_wanted(wanted)


def load_by_torch(call: LoadCall | InlineCall) -> Any:
    """Make a call that opjit cannot answer."""
    from opjit.builder import torch_builder

    if os.environ.get("OPJIT_RECORD"):
        progress.logger().warning(
            "the C++ extension %s is not recorded: only torch can build it", call.name
        )
    return torch_builder.original(call.function)(**call.for_torch())


def load_wanted(wanted: ExtensionBinary, found: Entry | None = None) -> Any:
    """Do what a call of `load` or `load_inline` does once its request is known. `found` is the entry, if the caller has one."""
    directory = wanted.call.build_directory
    if directory and not os.path.isdir(directory):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
    loaded = binary.with_entry(wanted, lambda entry: _deliver_and_open(entry, wanted), found)
    note_call(wanted.call.function, wanted.call.for_torch(), wanted.inputs.archs)
    return loaded


def _deliver_and_open(entry: Entry, wanted: ExtensionBinary) -> Any:
    name = wanted.inputs.name
    directory = wanted.call.build_directory
    delivered = entry.library
    if wanted.call.verbose and entry.origin in ("layer", "store"):
        print(f"opjit: {name} is in the cache: {entry.folder}", file=sys.stderr)
    if directory:
        delivered = Path(directory, f"{name}.so")
        binary.copy_entry(entry, delivered)
    from_there = directory and any(
        "ORIGIN" in word for word in wanted.inputs.flags["link"]
    )  # its folder is part of its run path
    with nullcontext(str(delivered)) if from_there else loader.pinned(entry) as library:
        status = os.stat(library)
        file = (status.st_dev, status.st_ino)
        opened = _opened.get(name, set())
        torchs = getattr(
            sys.modules.get("torch.utils.cpp_extension"), "JIT_EXTENSION_VERSIONER", None
        )
        if file not in opened and (
            opened or name in getattr(torchs, "entries", ())
        ):  # the same names twice may end the process
            static_init.check_in_child(library, name)
        place = delivered if from_there else entry.library
        try:
            loaded = _open(name, library, place, entry.key, wanted.call.is_python_module)
        except (ImportError, OSError) as error:
            error.args = (f"{loader.with_cache_path(error, library, place)}{loader.advice(error)}",)
            raise
    _opened.setdefault(name, set()).add(file)
    return loaded


def _open(name: str, path: str, place: Path, key: str, is_python_module: bool) -> ModuleType | str:
    """Open a library as torch does, by a path that leads to its file; it goes by `place`. pybind11 and Python keep modules by name, so the
    name is unique while the module is made; the module's own code sees the plain one."""
    if not is_python_module:
        loader.name_as(ctypes.CDLL(path), place)
        torch.ops.load_library(str(place))
        return str(place)
    unique = f"{key}.{name}"
    opens = importlib.machinery.ExtensionFileLoader(unique, path)
    spec = importlib.util.spec_from_file_location(unique, path, loader=opens)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.name_as(ctypes.CDLL(path), place)
    module.__file__ = spec.origin = opens.path = str(place)
    module.__name__ = name
    module.__package__ = name.rpartition(".")[0]
    opens.exec_module(module)
    spec.name = name
    if unique in sys.modules:  # Python itself adds a module without phases
        sys.modules[name] = module
    return module

"""A drop-in replacement for torch.utils.cpp_extension, with opjit's cache.

    >>> from opjit import cpp_extension                     # instead of: from torch.utils import cpp_extension
    >>> module = cpp_extension.load("ext", ["ext.cpp"])

`load`, `load_inline` and `BuildExtension` have the arguments and results of torch's functions. All other names come from torch's module.
If you cannot edit the code, use `patched` or the command `opjit run`.

An extension is built once for all processes, users and machines that share the cache. They load it without a compiler.
"""

import ctypes
import errno
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opjit import builder, loader, progress, request
from opjit.cpp_extension import binary, static_init
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.binary import ExtensionRequest
from opjit.cpp_extension.identity import Unsupported
from opjit.errors import OpjitError
from opjit.store.entry import Entry
from opjit.store.store import default_store

__all__ = ["load", "load_inline", "patched"]

# With OPJIT_EMULATE, `opjit.emulate` makes a call without CUDA of a call with CUDA sources, and changes no other call.
emulator: Callable[[LoadCall | InlineCall], LoadCall | InlineCall] | None = None

_opened: dict[
    str, set[tuple[int, int]]
] = {}  # by name: the device and inode of each library that this process has opened


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
    """Build and load an extension as torch.utils.cpp_extension.load does, with opjit's cache.

    The arguments are the same as torch's. These are the differences:

    - The cache key covers the content of sources, headers and static libraries, the flags, the CUDA architectures, and the versions of
      torch, Python, CUDA and the compilers. Editing a header triggers a rebuild, even if the process has loaded the extension. Touching
      files or moving the checkout does not.
    - opjit compiles C++ with light headers, the part of torch's headers that your code uses, which compiles up to 10x faster than
      torch/extension.h. If your code does not compile with them, opjit uses torch/extension.h. `opjit why NAME` shows which headers it
      used, and why.
    - After an edit, opjit compiles only the changed sources, because the cache keeps the object files of an extension with several
      sources.
    - The CUDA architectures come from TORCH_CUDA_ARCH_LIST or, if it is not set, from OPJIT_ARCH or the visible GPUs. You can build
      without a GPU.
    - If several processes request an extension at the same time, one of them builds it. If it is killed, another process continues.
    - If the content changes within a process, opjit loads a new module with the name NAME. With torch, its name would be NAME_v1.
    - If the static initializers of a library would end the process, you get a LoadError, because a forked child opens the library first.
    - The sources are compiled and linked in the order of their paths, so the order of the argument does not matter.
    - build_directory receives the binary under torch's name, build.ninja and the inline sources, each by one rename. opjit loads the
      binary in the cache, unless its run path contains $ORIGIN. Without build_directory, a relative -L and $ORIGIN find nothing, because
      opjit does not use torch's default directory. keep_intermediates matters for ROCm only.
    - An extension for torch's stable ABI is one binary for every torch from its TORCH_TARGET_VERSION on, if it imports only functions of
      that ABI.
    - Read-only caches, remote caches and archives contain extensions like ops. If no compiler is installed, a binary from any compiler is
      a hit. `opjit record` lists extensions, `opjit precompile --extensions` builds them in advance, and `opjit.distributed.load` builds
      them once per job.
    - opjit passes ROCm and SYCL builds, programs (``is_standalone=True``) and arguments of unexpected types to torch unchanged.

    Args:
        fast: False, or OPJIT_FAST=0, compiles with torch/extension.h and nvcc.
        newer: arguments of later versions of torch, which opjit passes on.

    Returns:
        The module, or the path of the loaded library with ``is_python_module=False``, or the path of the program with
        ``is_standalone=True``.

    Raises:
        ToolMissing, CompileError, BuildError, UnknownArch, LoadError: see `opjit.errors`. All of them are RuntimeErrors.

    Example:
        >>> module = opjit.load("ext", ["ext.cpp"], extra_cflags=["-O2"])
        >>> module.twice(torch.ones(1))
        tensor([2.])
    """
    return _load_call(LoadCall(**locals()))  # the fields have the parameters' names


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
    """Build and load inline sources as torch.utils.cpp_extension.load_inline does, with opjit's cache.

    `load` lists the differences. `use_pch` has no effect, because torch would write a precompiled header of 749 MB, which takes longer
    than most builds.

    Example:
        >>> source = "at::Tensor twice(at::Tensor x) { return x + x; }"
        >>> opjit.load_inline("ext", source, functions="twice").twice(torch.ones(1))
        tensor([2.])
    """
    return _load_call(InlineCall(**locals()))  # the fields have the parameters' names


@contextmanager
def patched() -> Iterator[None]:
    """Replace load and load_inline of torch.utils.cpp_extension in a with block, for code that you cannot edit.

    The replacement applies to all threads. It does not apply to a name that was imported from torch's module before the block.
    `opjit run program.py` does the same for a whole program and its child processes, and also replaces BuildExtension.

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


def __getattr__(name: str) -> Any:
    """Return opjit's BuildExtension, or another name of torch's module: include_paths, CUDAExtension, CUDA_HOME, …"""
    # Python is about to import a module.
    if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}"):
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
    if emulator is not None:
        call = emulator(call)
    try:
        return load_wanted(binary.of_call(call, default_store().notes))
    except Unsupported:
        return load_by_torch(call)
    except OpjitError as error:
        raise error.with_traceback(None) from error.__cause__  # the frames below do not help a user


def load_by_torch(call: LoadCall | InlineCall) -> Any:
    """Pass a call to torch, because opjit cannot handle it."""
    from opjit.builder import torch_builder

    if os.environ.get("OPJIT_RECORD"):
        progress.logger().warning(
            "the C++ extension %s is not recorded: only torch can build it", call.name
        )
    return torch_builder.original(call.function)(**call.for_torch())


def load_wanted(wanted: ExtensionRequest, found: Entry | None = None) -> Any:
    """Find or build the binary of a call of `load` or `load_inline`, and load it. `found` is the entry, if the caller has it."""
    directory = wanted.call.build_directory
    if directory and not os.path.isdir(directory):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
    find = partial(request.obtain, wanted)
    loaded = request.use_entry(find, lambda entry: _deliver_and_open(entry, wanted), found)
    if os.environ.get("OPJIT_RECORD"):
        from opjit.shared_library import recorded

        recorded.note_call(wanted.call.function, wanted.call.for_torch(), wanted.inputs.archs)
    return loaded


def _deliver_and_open(entry: Entry, wanted: ExtensionRequest) -> Any:
    name = wanted.inputs.name
    directory = wanted.call.build_directory
    delivered = entry.library
    if wanted.call.verbose and entry.origin in ("layer", "store"):
        print(f"opjit: {name} is in the cache: {entry.folder}", file=sys.stderr)
    if directory:
        delivered = Path(directory, f"{name}.so")
        binary.copy_entry(entry, delivered)
    # Its folder is part of its run path.
    from_there = directory and any("ORIGIN" in word for word in wanted.inputs.flags["link"])
    with nullcontext(str(delivered)) if from_there else loader.pinned(entry) as library:
        status = os.stat(library)
        file = (status.st_dev, status.st_ino)
        opened = _opened.get(name, set())
        torchs = getattr(
            sys.modules.get("torch.utils.cpp_extension"), "JIT_EXTENSION_VERSIONER", None
        )
        if file not in opened and (
            opened or name in getattr(torchs, "entries", ())
        ):  # loading the same names twice can end the process
            static_init.check_in_child(library, name)
        place = delivered if from_there else entry.library
        try:
            loaded = _open(name, library, place, entry.key, wanted.call.is_python_module)
        except (ImportError, OSError) as error:
            error.args = (loader.explained(error, library, place),)
            raise
    _opened.setdefault(name, set()).add(file)
    return loaded


def _open(name: str, path: str, place: Path, key: str, is_python_module: bool) -> ModuleType | str:
    """Open a library as torch does, by a path that leads to its file. Its name in messages and in the module is `place`.

    pybind11 and Python keep modules by name, so the name is unique until the module exists. The module's code sees the plain name.
    """
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

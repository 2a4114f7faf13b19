"""torch.utils.cpp_extension with opjit's cache: the same functions, arguments and results.

    from opjit import cpp_extension                     # instead of: from torch.utils import cpp_extension
    module = cpp_extension.load("ext", ["ext.cpp"])

What was built once from the same content is not built again: another process, user or machine with the cache loads it without a
compiler and without importing torch's builder. What is neither `load` nor `load_inline` is torch's own.
"""

from __future__ import annotations

import errno
import importlib.abc
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opjit import api, counters, extension, files, forks, loader, manifest
from opjit.environment import is_on
from opjit.errors import BuildError, LoadError
from opjit.extension import Extension, Unusual
from opjit.store import Entry, Store, default_root

_numbers: dict[str, dict[str, int]] = {}  # by name: the number of each extension that this process has under it


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
    **newer: Any,
) -> Any:
    """torch.utils.cpp_extension.load, out of opjit's cache where that has it.

    The arguments and what they do are torch's. In addition:

    - A binary is known by content: sources, headers, flags, static libraries, the versions of torch, Python, CUDA and the compilers, and
      the CUDA archs. A header that changes is noticed, also in the process that has the extension loaded; a file that is only touched, or a
      checkout that lies elsewhere, changes nothing.
    - CUDA archs are those of TORCH_CUDA_ARCH_LIST, else of OPJIT_ARCH, else the visible GPUs'. A build needs no GPU.
    - Of many processes that ask at once, one builds; when it is killed, another takes over.
    - build_directory receives the binary, build.ninja and the inline sources, each by one rename; what is loaded is the cache's own.
      torch's objects are not kept: what has changed is compiled as a whole. keep_intermediates is about ROCm.
    - Changed content gets the names NAME_v1, NAME_v2 in one process, as torch gives them. Content that the process had before has its
      first name, and failed builds use up none.
    - An extension that would end the process in a static initialiser is a LoadError, found out in a forked child.
    - The cache is the local one: OPJIT_LAYERS and OPJIT_REMOTE are for ops. An extension's binary is tied to one version of torch and
      Python, and to headers that only its build finds.
    - ROCm and SYCL builds, and arguments that opjit cannot read, are passed to torch as they are.

    Args:
        newer: what later versions of torch take; passed on.

    Returns:
        The module; with ``is_python_module=False`` the path of the library, which is loaded; with ``is_standalone=True`` the path of
        the program.

    Raises:
        ToolMissing, CompileError, BuildError, UnknownArch, LoadError: see `opjit.errors`; all are RuntimeErrors.

    Example:
        >>> module = opjit.load("ext", ["ext.cpp", "ext_kernel.cu"], extra_cflags=["-O2"])
    """
    return _load("load", locals())


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
    **newer: Any,
) -> Any:
    """torch.utils.cpp_extension.load_inline, out of opjit's cache where that has it; see `load` for what is different.

    Example:
        >>> source = "at::Tensor twice(at::Tensor x) { return x + x; }"
        >>> opjit.load_inline("ext", source, functions="twice").twice(torch.ones(1))
        tensor([2.])
    """
    return _load("load_inline", locals())


def __getattr__(name: str) -> Any:
    """The rest of torch's module: include_paths, CUDAExtension, BuildExtension, CUDA_HOME, …"""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_torch(), name)


def _torch() -> Any:
    return importlib.import_module("torch.utils.cpp_extension")


def _load(function: str, given: dict[str, Any]) -> Any:
    arguments = {name: value for name, value in given.items() if name != "newer"} | given["newer"]
    root = Store(default_root())
    try:
        asked = extension.describe(arguments, root.notes)
    except Unusual:
        return getattr(_torch(), function)(**arguments)
    directory = arguments["build_directory"]
    if directory and not os.path.isdir(directory):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
    base = asked.base
    number = _number(asked.name, base)
    wanted = asked._replace(name=f"{asked.name}_v{number}") if number else asked
    _, loaded = loader.found(lambda store: _find_or_build(wanted, arguments, store or root),
                             lambda entry: _use(entry, wanted, arguments, number))
    if not wanted.program:
        _numbers.setdefault(asked.name, {}).setdefault(base, number)
    return loaded


def _use(entry: Entry, wanted: Extension, arguments: dict[str, Any], number: int) -> Any:
    """Deliver and open an entry.

    Raises:
        loader.Gone: it is not there any more.
    """
    try:
        return _deliver_and_open(entry, wanted, arguments, number)
    except (OSError, ImportError, LoadError) as error:
        if entry.library.exists():
            raise
        raise loader.Gone(str(error)) from error


def _deliver_and_open(entry: Entry, wanted: Extension, arguments: dict[str, Any], number: int) -> Any:
    directory = arguments["build_directory"]
    delivered = _deliver(entry, wanted, Path(directory)) if directory else entry.library
    if wanted.program:
        return str(delivered)
    if number:  # what its predecessor registered with torch may be in its way, and that would end the process
        from opjit import trial

        trial.open_in_child(str(entry.library), wanted.name)
    try:
        return _open(wanted.name, str(entry.library), arguments["is_python_module"])
    except (ImportError, OSError) as error:
        return _open(wanted.name, str(loader.elsewhere(entry, error)), arguments["is_python_module"])


def _number(name: str, identity: str) -> int:
    """0 for the first extension of a name in this process, 1 for the next, …"""
    known = _numbers.get(name, {})
    return known.get(identity, len(known))


def _find_or_build(wanted: Extension, arguments: dict[str, Any], root: Store) -> Entry:
    started = time.perf_counter()
    found = wanted.find(root)
    if found is not None:
        counters.hit("store", root.base, found.seconds, started)
        if arguments["verbose"]:
            print(f"opjit: {wanted.name} is in the cache: {found.folder}", file=sys.stderr)
        if api.followed():
            from opjit import progress

            progress.say(f"{wanted.name} for {wanted.for_whom} is built already: {found.folder}")
        return found
    if is_on("OPJIT_OFFLINE"):
        raise BuildError(f"{wanted.name} for {wanted.for_whom} is in no cache, and OPJIT_OFFLINE forbids to build it", op=wanted.name,
                         target=wanted.for_whom)
    with forks.importing():
        from opjit import extension_build, lock, progress

    with (progress.shown(f"building {wanted.name} for {wanted.for_whom}") as say,
          lock.held(wanted.key, lambda holder: say(f"waiting for {wanted.name}: {holder}"))):
        wanted = wanted._replace(inputs=wanted.inputs_now())  # as the sources are after the wait
        found = wanted.find(root, quiet=True)
        if found is not None:
            counters.hit("store", root.base, found.seconds, started)
            return found
        counters.miss(root.base)
        return progress.timed(f"{wanted.name} for {wanted.for_whom}", lambda: extension_build.build_extension(wanted, arguments, root))


def _deliver(entry: Entry, wanted: Extension, directory: Path) -> Path:
    """Leave what torch leaves in a build directory; what is right already is not written."""
    place = directory / (wanted.name if wanted.program else f"{wanted.name}.so")
    for name in os.listdir(entry.folder):
        source = entry.folder / name
        target = place if name == entry.library.name else directory / name
        if name == manifest.NAME or _same(source, target):
            continue
        temporary = directory / f".{files.unique()}"
        try:
            shutil.copyfile(source, temporary)
            temporary.chmod(0o755 if target == place else 0o644)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return place


def _same(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
    except FileNotFoundError:
        return False


def _open(name: str, path: str, is_python_module: bool) -> ModuleType | str:
    """As torch does it."""
    if not is_python_module:
        torch.ops.load_library(path)
        return path
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert isinstance(spec.loader, importlib.abc.Loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

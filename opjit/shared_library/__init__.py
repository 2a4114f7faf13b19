"""`opjit.build`: C, C++ and CUDA sources of any project as a shared library from opjit's cache. Importing it does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from opjit import request
from opjit.shared_library import identity
from opjit.shared_library.binary import LibraryBinary
from opjit.store.store import Store, default_root

__all__ = ["build"]


def build(
    name: str,
    sources: Sequence[str | os.PathLike[str]] = (),
    *,
    generated: Mapping[str, str] | None = None,
    cflags: Sequence[str] = (),
    cuda_cflags: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    include: Sequence[str | os.PathLike[str]] = (),
    archs: Sequence[str] | None = None,
    launcher: Sequence[str] = (),
    compile_commands: str | os.PathLike[str] | None = None,
) -> Path:
    """Compile sources into one shared library, or take it from the cache. The caller opens it: ctypes, dlopen, tvm_ffi.load_module.

    The key is content: sources, the headers that they include, flags, archs and the compilers' versions. It has no path, torch or Python.
    Layers, remotes, OPJIT_OFFLINE, OPJIT_JOBS, pruning, `opjit record`, `precompile` and `why` serve libraries as they do
    extensions.

    Args:
        name: the library's; libraries with other content may have it, too.
        sources: files that end with .c, .cc, .cpp, .cxx or .cu. They are linked in this order.
        generated: texts of further files by name, such as ``{"kernel_f16.cu": text, "config.h": text}``. Sources among them are compiled,
            too, and all #include lines find the others.
        cflags: arguments for the C and C++ compilers, for example ``["-O3"]``. Without ``-std``, C++ is C++17.
        cuda_cflags: arguments for nvcc, for example ``["-rdc=true"]``. Without ``-std``, CUDA C++ is C++17.
        ldflags: arguments for the linker, for example ``["-lcuda"]``. The key has the content of static libraries and the
            names of shared ones.
        include: folders of headers.
        archs: for CUDA code, such as ``["9.0a", "10.3a", "12.0f", "9.0+PTX"]`` or ``["sm_90a"]``; None is OPJIT_ARCH, else
            TORCH_CUDA_ARCH_LIST.
        launcher: a program that gets each compiler's command, such as ``["sccache"]``, else as in ``CXX="ccache c++"``; not in the key.
        compile_commands: where to write the commands for editors and clang-tidy, such as ``"build/compile_commands.json"``; generated
            files go into ``generated`` beside it.

    Returns:
        The path of the verified library in the cache. It stays as it is while the process keeps it open.

    Raises:
        BuildError: an argument is wrong, or the build failed; as CompileError, at the line that a compiler refused.
        UnknownArch: no compiler knows an arch, or CUDA code has none.
        ToolMissing: a compiler is missing; the message says what to install.

    Example:
        >>> import ctypes
        >>> path = opjit.build("adder", generated={"adder.c": "int add(int a, int b) { return a + b; }"})
        >>> ctypes.CDLL(path).add(2, 3)
        5
    """
    store = Store(default_root())
    given = {"cflags": cflags, "cuda_cflags": cuda_cflags, "ldflags": ldflags}
    library = identity.describe(
        name, sources, generated or {}, given, include, archs, launcher, store.notes
    )
    if compile_commands is not None:
        from opjit.shared_library import compilation

        compilation.write_commands(library, store, Path(compile_commands).absolute())
    wanted = LibraryBinary(library)
    entry = request.look(wanted, store) or request.obtain(wanted, store)
    if os.environ.get("OPJIT_RECORD"):
        from opjit.shared_library import recorded

        recorded.note(library)
    return entry.library

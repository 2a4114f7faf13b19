"""`opjit.build`: C, C++ and CUDA sources of any project as a shared library from opjit's cache. Importing it does not import torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from opjit import request
from opjit.files import StrPath
from opjit.shared_library import identity
from opjit.shared_library.binary import LibraryRequest
from opjit.store.store import default_store

__all__ = ["build"]


def build(
    name: str,
    sources: Sequence[StrPath] = (),
    *,
    generated: Mapping[str, str] | None = None,
    cflags: Sequence[str] = (),
    cuda_cflags: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    include: Sequence[StrPath] = (),
    archs: Sequence[str] | None = None,
    launcher: Sequence[str] = (),
    compile_commands: StrPath | None = None,
) -> Path:
    """Compile sources into one shared library, or find it in the cache.

    The caller opens the library, for example with ctypes, dlopen or tvm_ffi.load_module. The key covers the content of sources and
    headers, flags, architectures and compilers, but not paths, torch or Python. Read-only caches, remote caches, OPJIT_OFFLINE,
    OPJIT_JOBS, pruning, `opjit record`, `precompile` and `why` work with libraries as with extensions.

    Args:
        name: the name of the library. Libraries with other content may have the same name.
        sources: files that end with .c, .cc, .cpp, .cxx or .cu. They are linked in this order.
        generated: texts of more files by name, for example ``{"kernel_f16.cu": text, "config.h": text}``. Sources among them are also
            compiled, and all #include lines find the other files.
        cflags: arguments for the C and C++ compilers, for example ``["-O3"]``. Without ``-std``, C++ is C++17.
        cuda_cflags: arguments for nvcc, for example ``["-rdc=true"]``. Without ``-std``, CUDA C++ is C++17.
        ldflags: arguments for the linker, for example ``["-lcuda"]``. The libraries that it reads are part of the key.
        include: directories of headers.
        archs: architectures of CUDA code, for example ``["9.0a", "10.3a", "12.0f", "9.0+PTX"]`` or ``["sm_90a"]``. None means
            OPJIT_ARCH, or TORCH_CUDA_ARCH_LIST.
        launcher: a program that runs each compiler's command, for example ``["sccache"]``. The default is the launcher in ``CXX``. The
            text of a script is part of the key, and another program is not.
        compile_commands: a file for the commands, for editors and clang-tidy, for example ``"build/compile_commands.json"``. Generated
            files go into ``generated`` next to it.

    Returns:
        The path of the verified library in the cache. It does not change while the process keeps it open.

    Raises:
        BuildError: an argument is wrong, or the build failed. For a compile error, it is a CompileError with the line.
        UnknownArch: no compiler supports an architecture, or CUDA code lacks one.
        ToolMissing: a compiler is missing. The message names the package to install.

    Example:
        >>> import ctypes
        >>> path = opjit.build("adder", generated={"adder.c": "int add(int a, int b) { return a + b; }"})
        >>> ctypes.CDLL(path).add(2, 3)
        5
    """
    store = default_store()
    given = {"cflags": cflags, "cuda_cflags": cuda_cflags, "ldflags": ldflags}
    library = identity.describe(
        name, sources, generated or {}, given, include, archs, launcher, store.notes
    )
    if compile_commands is not None:
        from opjit.shared_library import compilation

        compilation.write_commands(library, store, Path(compile_commands).absolute())
    wanted = LibraryRequest(library)
    entry = request.obtain(wanted, store)
    if os.environ.get("OPJIT_RECORD"):
        from opjit.shared_library import recorded

        recorded.note(library)
    return entry.library

"""NVRTC, NVIDIA's compiler as a library: machine code for GPUs from device code, in this process,
in 0.05 s.

It compiles one program at a time in a process. If a program waits longer than a process needs to
start, it is compiled in another process.

The interface: https://docs.nvidia.com/cuda/nvrtc. A fat binary holds the machine code for several archs, as NVIDIA's tool `fatbinary`
writes it without compression."""

import ctypes
import re
import struct
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from opjit import processes, resources
from opjit.builder.compile_step import CompilerFailed

# Headers by their names in #include lines. NVRTC has the functions of most, and the headers in
# kernels_c/nvrtc/device have the rest.
_EMPTY_NAMES = """
    stdbool.h string.h cstring stdlib.h cstdlib stdio.h cstdio time.h errno.h unistd.h
    device_launch_parameters.h vector_types.h vector_functions.h vector string map
    unordered_map set list memory mutex functional iostream sstream iomanip fstream
    stdexcept algorithm numeric random chrono thread cstdarg stdarg.h
"""
_EMPTY = tuple(_EMPTY_NAMES.split())
_OF_FILES = {
    "stdint.h": "stdint.h inttypes.h cstdint",
    "limits.h": "limits.h climits",
    "math.h": "math.h cmath",
    "float.h": "float.h cfloat",
    "assert.h": "assert.h cassert",
    "stddef.h": "stddef.h cstddef",
    "cuda_runtime.h": "cuda_runtime.h cuda_runtime_api.h cuda.h",
    "libraries.h": "cublas_v2.h cublasLt.h cudnn.h nccl.h cufft.h curand.h cusolverDn.h cusparse.h",
}
_OF_LIBCUDACXX = "type_traits limits utility array tuple initializer_list complex"
_turn = processes.Lock()
_START = 0.1  # seconds that another process needs to start
_FEATURES = {"a": 0x100000, "f": 0x200000}  # sm_90a, sm_100f


def own_header(name: str) -> str:
    """Return a file of kernels_c/nvrtc/device."""
    return (resources.folder("kernels_c") / "nvrtc/device" / name).read_text("utf-8")


@cache
def headers() -> dict[str, str]:
    """Return the texts of the headers that every device code may include, by name."""
    return {
        **dict.fromkeys(_EMPTY, ""),
        "opjit_gnu.h": own_header("gnu.h"),
        **{name: own_header(file) for file, names in _OF_FILES.items() for name in names.split()},
        **{
            name: f"#pragma once\n#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n"
            for name in _OF_LIBCUDACXX.split()
        },
    }


class DeviceCode(NamedTuple):
    """Machine code, the symbols of the expressions that were asked for, and the compiler's warnings."""

    code: bytes
    symbols: Mapping[str, str]
    log: str


@cache
def _library(path: str) -> ctypes.CDLL:
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))  # NVRTC opens it by its name, which finds a loaded one
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


@cache
def release(path: str) -> str:
    """Return the release of the libnvrtc.so at `path`, such as ``13.0.88``, in the form that it
    writes into PTX.
    """
    ptx = compile_for(path, "", "release.cu", {}, ["--gpu-architecture=compute_90"], []).code
    found = re.search(rb", V([\d.]+)", ptx)
    return found[1].decode() if found else "0.0.0"


def compile_for(
    path: str,
    source: str,
    name: str,
    more: Mapping[str, str],
    options: Sequence[str],
    expressions: Sequence[str],
) -> DeviceCode:
    """Compile device code for one arch with the libnvrtc.so at `path`. Raises CompilerFailed with the compiler's messages. `more` has texts
    of headers, by the names in #include lines; the first option is the arch, ``--gpu-architecture=sm_90`` for machine code and
    ``compute_90`` for PTX; `expressions` are template instances and variables to keep, such as ``scale<float>`` and ``&table``."""
    given = (path, source, name, more, options, expressions)
    if not _turn.acquire(timeout=_START):
        with suppress(OSError, subprocess.SubprocessError):
            return processes.call_elsewhere(_compile_program, *given)
        _turn.acquire()  # no process can be started
    try:
        return _compile_program(*given)
    finally:
        _turn.release()


def _compile_program(
    path: str,
    source: str,
    name: str,
    more: Mapping[str, str],
    options: Sequence[str],
    expressions: Sequence[str],
) -> DeviceCode:
    """Compile in this process; see `compile_for`."""

    def encoded(texts: Collection[str]) -> ctypes.Array[ctypes.c_char_p]:
        return (ctypes.c_char_p * len(texts))(
            *(text.encode("utf-8", "surrogateescape") for text in texts)
        )

    library = _library(path)
    program = ctypes.c_void_p()
    included = {**headers(), **more}
    _require_success(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            source.encode("utf-8", "surrogateescape"),
            name.encode(),
            len(included),
            encoded(included.values()),
            encoded(included),
        ),
    )
    try:
        for expression in expressions:
            _require_success(library, library.nvrtcAddNameExpression(program, expression.encode()))
        refused = library.nvrtcCompileProgram(program, len(options), encoded(options))
        log = _bytes(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if refused:
            raise CompilerFailed(log)
        symbols = {}
        symbol = ctypes.c_char_p()
        for expression in expressions:
            _require_success(
                library,
                library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol)),
            )
            symbols[expression] = (symbol.value or b"").decode()
        return DeviceCode(
            _bytes(library, program, "PTX" if "=compute_" in options[0] else "CUBIN"), symbols, log
        )
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _require_success(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _require_success(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _require_success(library: ctypes.CDLL, code: int) -> None:
    if code:
        raise CompilerFailed(library.nvrtcGetErrorString(code).decode())


def fatbin(codes: Mapping[str, bytes]) -> bytes:
    """Return a fat binary of code by arch: machine code for ``"sm_90"``, PTX for ``"compute_90"``."""
    parts = []
    for arch, code in codes.items():
        padded = code + bytes(-len(code) % 8)
        number = int("".join(filter(str.isdigit, arch)))
        feature = _FEATURES.get(arch[-1], 0)
        if arch.startswith("compute"):
            kind = 1
            flags = 0x11 | feature
            more = struct.pack("<II8x", 72, 0)
            version = re.search(rb"^\.version (\d+)\.(\d+)", code, re.MULTILINE)
            major, minor = map(int, version.groups()) if version else (0, 0)
        else:
            kind = 2
            major = 1
            minor = 8
            compatible = _section(code, b".nv.compat") if number >= 100 else b""
            more = struct.pack("<IIx", 72, len(compatible)) + compatible if compatible else b""
            more += bytes(-len(more) % 8)
            flags = 0x11 | feature | (0x1000000 if more else 0)
        header = struct.pack(
            "<HHIQIIHHIIIQ16x",
            kind,
            0x101,
            64 + len(more),
            len(padded),
            0,
            64 if more else 0,
            minor,
            major,
            number,
            0,
            0,
            flags,
        )
        parts += [header, more, padded]
    content = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def _section(cubin: bytes, name: bytes) -> bytes:
    """Return the content of a section of an ELF file, or an empty content if the file lacks it."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    sections = [
        struct.unpack_from("<IIQQQQ", cubin, start + index * size) for index in range(count)
    ]
    strings = cubin[sections[names][4] :]
    return next(
        (
            cubin[section[4] : section[4] + section[5]]
            for section in sections
            if strings.startswith(name + b"\0", section[0])
        ),
        b"",
    )

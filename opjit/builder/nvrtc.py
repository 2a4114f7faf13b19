"""NVRTC, NVIDIA's compiler as a library: machine code for GPUs from device code, in this process, in 0.05 s.

The interface: https://docs.nvidia.com/cuda/nvrtc. A fat binary holds the machine code for several archs, as NVIDIA's tool `fatbinary`
writes it without compression.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from opjit.builder.compile_step import CompilerFailed

# C's headers, most of which NVRTC needs only by name: it knows their functions.
_INTEGERS = "".join(f"typedef {c} int{bits}_t; typedef unsigned {c} uint{bits}_t;\n"
                    for bits, c in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))).replace("typedef char", "typedef signed char")
_LIMITS = """#pragma once
#define CHAR_BIT 8
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define SHRT_MIN (-32768)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MIN (-2147483647 - 1)
#define INT_MAX 2147483647
#define UINT_MAX 4294967295U
#define LONG_MIN (-9223372036854775807L - 1L)
#define LONG_MAX 9223372036854775807L
#define ULONG_MAX 18446744073709551615UL
#define LLONG_MIN (-9223372036854775807LL - 1LL)
#define LLONG_MAX 9223372036854775807LL
#define ULLONG_MAX 18446744073709551615ULL
"""
_STDINT = f"""#pragma once
{_INTEGERS}typedef long intptr_t; typedef unsigned long uintptr_t; typedef long intmax_t; typedef unsigned long uintmax_t;
#define INT64_C(x) x##L
#define UINT64_C(x) x##UL
#define INT32_C(x) x
#define UINT32_C(x) x##U
#define INT8_MIN (-128)
#define INT8_MAX 127
#define UINT8_MAX 255
#define INT16_MIN (-32768)
#define INT16_MAX 32767
#define UINT16_MAX 65535
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295U
#define INT64_MIN (-9223372036854775807L - 1L)
#define INT64_MAX 9223372036854775807L
#define UINT64_MAX 18446744073709551615UL
#define SIZE_MAX 18446744073709551615UL
"""
_MATH = """#pragma once
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#define M_2_SQRTPI 1.12837916709551257390
#define M_E 2.7182818284590452354
#define M_LN2 0.69314718055994530942
#define M_LOG2E 1.4426950408889634074
#ifndef INFINITY
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#endif
#ifndef NAN
#define NAN __builtin_bit_cast(float, 0x7fc00000)
#endif
#define HUGE_VAL double(INFINITY)
#define HUGE_VALF INFINITY
"""
_FLOAT = """#pragma once
#define FLT_MAX 3.40282346638528859811704183484516925e+38F
#define FLT_MIN 1.17549435082228750796873653722224568e-38F
#define FLT_EPSILON 1.19209289550781250000000000000000000e-7F
#define DBL_MAX 1.79769313486231570814527423731704357e+308
#define DBL_MIN 2.22507385850720138309023271733240406e-308
#define DBL_EPSILON 2.22044604925031308084726333618164062e-16
#define FLT_DIG 6
#define DBL_DIG 15
#define FLT_MANT_DIG 24
#define DBL_MANT_DIG 53
"""
_ASSERT = """#undef assert
#ifdef NDEBUG
#define assert(x) ((void)0)
#else
#define assert(x) ((x) ? (void)0 : __assertfail(#x, __FILE__, __LINE__, __func__, 1))
#endif
"""
_RUNTIME = """#pragma once
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
"""
HEADERS = {"stdint.h": _STDINT, "inttypes.h": _STDINT, "limits.h": _LIMITS, "math.h": _MATH, "float.h": _FLOAT, "assert.h": _ASSERT,
           "stddef.h": "#pragma once\ntypedef long ptrdiff_t;\n#ifndef offsetof\n#define offsetof(t, m) __builtin_offsetof(t, m)\n#endif\n",
           "stdbool.h": "", "string.h": "", "stdlib.h": "", "stdio.h": "", "time.h": "", "errno.h": "", "unistd.h": "",
           "cuda_runtime.h": _RUNTIME, "cuda_runtime_api.h": _RUNTIME, "cuda.h": _RUNTIME, "device_launch_parameters.h": "",
           "vector_types.h": "", "vector_functions.h": ""}
HEADERS |= {f"c{name.removesuffix('.h')}": HEADERS[name] for name in ("stdint.h", "limits.h", "math.h", "float.h", "assert.h", "stddef.h",
                                                                    "string.h", "stdlib.h", "stdio.h")}
_FEATURES = {"a": 0x100000, "f": 0x200000}  # sm_90a, sm_100f


# C++'s headers: those for the host alone are empty, the others are libcu++'s.
_OF_HOST = ("vector", "string", "map", "unordered_map", "set", "list", "memory", "mutex", "functional", "iostream", "sstream", "iomanip",
            "fstream", "stdexcept", "algorithm", "numeric", "random", "chrono", "thread", "cstdarg", "stdarg.h")
HEADERS |= dict.fromkeys(_OF_HOST, "")
# Interfaces of CUDA libraries, which only the host calls: their handles are enough for variables and parameters.
HEADERS |= {f"{name}.h": "#pragma once\n" + "".join(f"typedef {handle};\n" for handle in handles) for name, handles in {
    "cublas_v2": ["struct cublasContext *cublasHandle_t"], "cublasLt": ["struct cublasLtContext *cublasLtHandle_t"],
    "cudnn": ["struct cudnnContext *cudnnHandle_t"], "nccl": ["struct ncclComm *ncclComm_t"], "cufft": ["int cufftHandle"],
    "curand": ["struct curandGenerator_st *curandGenerator_t"], "cusolverDn": ["struct cusolverDnContext *cusolverDnHandle_t"],
    "cusparse": ["struct cusparseContext *cusparseHandle_t"]}.items()}
HEADERS |= {name: f"#pragma once\n#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n"
            for name in ("type_traits", "limits", "utility", "array", "tuple", "initializer_list", "complex")}


# <nv/target> of CCCL, which cooperative groups include, where CCCL is not installed: code for some archs, in
# parentheses or without them.
NV_TARGET = """#pragma once
#if __CUDA_ARCH__ >= 700
#define NV_PROVIDES_SM_70 1
#else
#define NV_PROVIDES_SM_70 0
#endif
#if __CUDA_ARCH__ >= 800
#define NV_PROVIDES_SM_80 1
#else
#define NV_PROVIDES_SM_80 0
#endif
#define OPJIT_BARE(...) OPJIT_BARE_1(OPJIT_SEEN __VA_ARGS__)
#define OPJIT_SEEN(...) OPJIT_SEEN __VA_ARGS__
#define OPJIT_BARE_1(...) OPJIT_BARE_2(__VA_ARGS__)
#define OPJIT_BARE_2(...) OPJIT_NO_##__VA_ARGS__
#define OPJIT_NO_OPJIT_SEEN
#define OPJIT_IF_1(yes, no) OPJIT_BARE(yes)
#define OPJIT_IF_0(yes, no) OPJIT_BARE(no)
#define OPJIT_IF(condition, yes, no) OPJIT_IF_##condition(yes, no)
#define NV_IF_ELSE_TARGET(condition, yes, no) OPJIT_IF(condition, yes, no)
#define NV_IF_TARGET(condition, yes) OPJIT_IF(condition, yes, ())
"""


class DeviceCode:
    """Machine code for one arch, the symbols of the expressions that were asked for, and the compiler's warnings."""

    def __init__(self, code: bytes, symbols: Mapping[str, str], log: str) -> None:
        self.code, self.symbols, self.log = code, symbols, log


@cache
def _library(path: str) -> ctypes.CDLL:
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))  # NVRTC opens it by its name, which finds a loaded one
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def compile_for(path: str, source: str, name: str, headers: Mapping[str, str], options: Sequence[str],
                expressions: Sequence[str]) -> DeviceCode:
    """Compile device code for one arch.

    Args:
        path: the path of libnvrtc.so.
        name: the source's name in messages.
        headers: texts, by the names in #include lines.
        options: NVRTC's; the first is the arch, ``--gpu-architecture=sm_90`` for machine code and ``compute_90`` for PTX.
        expressions: template instances and variables to keep, such as ``"scale<float>"`` and ``"&table"``.

    Raises:
        CompilerFailed: with the compiler's messages.
    """
    library = _library(path)
    with _program(library, source, name, {**HEADERS, **headers}) as program:
        for expression in expressions:
            _checked(library, library.nvrtcAddNameExpression(program, expression.encode()))
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        refused = library.nvrtcCompileProgram(program, len(options), arguments)
        log = _bytes(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if refused:
            raise CompilerFailed(log)
        symbols = {expression: _symbol(library, program, expression) for expression in expressions}
        return DeviceCode(_bytes(library, program, "PTX" if "=compute_" in options[0] else "CUBIN"), symbols, log)


@contextmanager
def _program(library: ctypes.CDLL, source: str, name: str, headers: Mapping[str, str]) -> Iterator[ctypes.c_void_p]:
    program, count = ctypes.c_void_p(), len(headers)
    texts = (ctypes.c_char_p * count)(*(text.encode("utf-8", "surrogateescape") for text in headers.values()))
    names = (ctypes.c_char_p * count)(*(each.encode("utf-8", "surrogateescape") for each in headers))
    _checked(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode("utf-8", "surrogateescape"), name.encode(), count,
                                                 texts, names))
    try:
        yield program
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _checked(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _symbol(library: ctypes.CDLL, program: ctypes.c_void_p, expression: str) -> str:
    symbol = ctypes.c_char_p()
    _checked(library, library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol)))
    return (symbol.value or b"").decode()


def _checked(library: ctypes.CDLL, code: int) -> None:
    if code:
        raise CompilerFailed(library.nvrtcGetErrorString(code).decode())


def fatbin(codes: Mapping[str, bytes]) -> bytes:
    """Return a fat binary of code by arch: machine code for ``"sm_90"``, PTX for ``"compute_90"``."""
    parts = []
    for arch, code in codes.items():
        padded = code + bytes(-len(code) % 8)
        number, feature = int("".join(filter(str.isdigit, arch))), _FEATURES.get(arch[-1], 0)
        if arch.startswith("compute"):
            kind, flags, more = 1, 0x11 | feature, struct.pack("<II8x", 72, 0)
            version = re.search(rb"^\.version (\d+)\.(\d+)", code, re.MULTILINE)
            major, minor = map(int, version.groups()) if version else (0, 0)
        else:
            kind, major, minor = 2, 1, 8
            compatible = _section(code, b".nv.compat") if number >= 100 else b""
            more = struct.pack("<IIx", 72, len(compatible)) + compatible if compatible else b""
            more += bytes(-len(more) % 8)
            flags = 0x11 | feature | (0x1000000 if more else 0)
        header = struct.pack("<HHIQIIHHIIIQ16x", kind, 0x101, 64 + len(more), len(padded), 0, 64 if more else 0, minor, major, number, 0, 0,
                             flags)
        parts += [header, more, padded]
    content = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def _section(cubin: bytes, name: bytes) -> bytes:
    """Return the content of a section of an ELF file; empty if there is none."""
    start, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + index * size) for index in range(count)]
    strings = cubin[sections[names][4]:]
    return next((cubin[section[4]:section[4] + section[5]] for section in sections if strings.startswith(name + b"\0", section[0])), b"")

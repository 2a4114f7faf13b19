"""A C++ library for any program, called with ctypes and, if tvm-ffi is installed, as a module of tvm-ffi. opjit does not import torch."""

import ctypes
import sys
from pathlib import Path

import opjit

MODULE = """
#include <tvm/ffi/function.h>
static int64_t plus(int64_t x) { return x + AMOUNT; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plus, plus)
"""


# begin: call
def by_ctypes() -> None:
    generated = {"amount.h": "#define AMOUNT 40\n"}  # for example from a template of your program
    path = opjit.build("plus", [Path(__file__).with_name("plus.cpp")], generated=generated, cflags=["-O3"])
    print("ctypes:", ctypes.CDLL(str(path)).plus(2))
# end: call


def by_tvm_ffi() -> None:
    try:
        import tvm_ffi
    except ImportError:
        print("tvm-ffi: skipped, because it is not installed; pip install apache-tvm-ffi")
        return
    include = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    path = opjit.build("plus_module", generated={"plus.cc": MODULE}, include=include, cflags=["-DAMOUNT=40"])
    print("tvm-ffi:", tvm_ffi.load_module(str(path)).plus(2))


by_ctypes()
print("torch imported:", "torch" in sys.modules)
by_tvm_ffi()  # it imports torch if torch is installed

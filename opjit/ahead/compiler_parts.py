"""``opjit precompile --warm-compilers``: make the parts of builds that depend only on torch and the compilers of this machine."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from opjit import batch, files
from opjit.builder import runtime_objects
from opjit.cpp_extension import autograd_part, binary
from opjit.cpp_extension.arguments import InlineCall
from opjit.cpp_extension.light import core, vocabulary
from opjit.errors import ToolMissing, UnknownArch
from opjit.recipe import toolchain
from opjit.store.store import Store

_DECLARATION = "at::Tensor same(at::Tensor x);"
_DEFINITION = "at::Tensor same(at::Tensor x) { return x; }"
_CUDA = f"#include <torch/extension.h>\n__global__ void nothing() {{}}\n{_DEFINITION}"


def make_parts(store: Store, write: Callable[[str], object]) -> None:
    """Make the parts of ops for this machine's devices, the parts of C++ extensions, and autograd's kernel in C++.

    `write` gets a line before autograd's kernel is built. Raises ToolMissing, CompileError, BuildError.
    """
    compiler = toolchain.require_compiler(store.notes)
    for backend, arch, runtime, _ in batch.targets_of((), store):
        runtime_objects.folder(store.base, compiler, backend.flags(arch, runtime))
    make_extension_parts(store)
    vocabulary.of_torch(store.base, toolchain.require_cxx(store.notes))
    autograd_part.make(store, write)


def make_extension_parts(store: Store) -> None:
    """Make the parts of C++ extensions with torch's flags, and with CUDA if the architectures are known. The binaries are not kept.

    Raises ToolMissing, CompileError, BuildError.
    """
    sample = InlineCall(name="opjit_sample", cpp_sources=_DEFINITION, functions="same")
    core.in_background = False
    try:
        _build_sample(sample, store)
        if torch.version.cuda is not None:
            with suppress(UnknownArch, ToolMissing):
                _build_sample(replace(sample, cpp_sources=_DECLARATION, cuda_sources=_CUDA), store)
    finally:
        core.in_background = True


def _build_sample(call: InlineCall, store: Store) -> None:
    entry = binary.of_call(call, store.notes).in_store().build(store)
    files.remove_tree(entry.folder.parents[1])

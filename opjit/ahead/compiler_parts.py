"""``opjit precompile --warm-compilers``: make the parts of builds that depend only on torch and the compilers of this machine."""

from collections.abc import Callable

from opjit import batch, files
from opjit.builder import runtime_objects
from opjit.cpp_extension import autograd_part, binary
from opjit.cpp_extension.arguments import InlineCall
from opjit.cpp_extension.light import vocabulary
from opjit.recipe import toolchain
from opjit.store.store import Store


def make_parts(store: Store, write: Callable[[str], object]) -> None:
    """Make the parts of ops for this machine's devices, the parts of C++ extensions, and autograd's kernel in C++.

    A C++ extension is built twice, with torch's flags, because the second build makes the precompiled header. Its binary is not kept.
    `write` gets a line before the kernel is built. Raises ToolMissing, CompileError, BuildError.
    """
    compiler = toolchain.require_compiler(store.notes)
    for backend, arch, runtime, _ in batch.targets_of((), store):
        runtime_objects.folder(store.base, compiler, backend.flags(arch, runtime))

    source = "at::Tensor same(at::Tensor x) { return x; }"
    sample = InlineCall(name="opjit_sample", cpp_sources=source, functions="same")
    wanted = binary.of_call(sample, store.notes).in_store()
    for _ in range(2):
        files.remove_tree(wanted.build(store).folder.parents[1])
    vocabulary.of_torch(store.base, toolchain.require_cxx(store.notes))
    autograd_part.make(store, write)

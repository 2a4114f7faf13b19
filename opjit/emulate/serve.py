"""OPJIT_EMULATE=1: the CUDA kernels of ops serve CPU tensors in this process, for `opjit.get`, `opjit.inline`, cells and plain calls."""

from opjit import backends, cpp_extension
from opjit.backends import DeviceCompiler, Flags, Stream
from opjit.backends.targets import Target
from opjit.declare.op_state import OpState
from opjit.emulate import build, extension
from opjit.store.entry import Entry


class EmulatedCuda(build.Emulated):
    """CUDA in name and sources, the CPU in tensors."""

    compiler: DeviceCompiler | None = None
    stream: Stream | None = Stream("cudaStream_t", "opjit_cuda.h", "")

    def host_arch(self) -> str:
        return "emulated"

    def takes(self, arch: str) -> bool:
        return False  # nobody names it: `opjit precompile` and wheels build for GPUs

    def flags(self, arch: str, runtime: str) -> Flags:
        """Return the flags of the key. A debug binary goes to no remote and into no wheel."""
        return super().flags(super().host_arch(), runtime)._replace(debug=True)

    def entry(self, op: OpState, target: Target) -> Entry:
        """Build an op's emulated kernel, unless it is built, in place of the store's entry."""
        library = build.binary(op, build.set_checking())
        build.warn_of_emulation()
        return build.entry_of(library)


def serve() -> None:
    """Let CUDA kernels serve CPU tensors from now on, unless this machine can run them."""
    if backends.for_device("cuda").available() is not None:
        backends.register_backend(EmulatedCuda())
        cpp_extension.emulator = extension.emulated_call

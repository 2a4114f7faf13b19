"""Backends, each of which builds and runs kernels on one kind of device. opjit has `cpu` and `cuda`.

To add another device, call `opjit.register_backend`. The page examples/09_own_device shows how.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from opjit.errors import UnknownDevice


class Shared(NamedTuple):
    """A CUDA library that torch needs, with its soname and its path on this machine."""

    soname: str
    path: str


class Stream(NamedTuple):
    """The stream of a device, and the C functions that the generated wrapper calls around a kernel.

    A kernel gets the stream as its last parameter. The functions belong to torch or to a library in `Flags.link`. Each returns 0 for
    success. If it fails, the RuntimeError contains its result.

    Attributes:
        type: the type of the stream in C, for example ``"cudaStream_t"``: a pointer, or an integer of the same size.
        header: the header that declares `type`, on the include path.
        current: ``int32_t current(int32_t device_index, void **stream)``, which gets the current stream of a device.
        exchange: ``int32_t exchange(int32_t device_index, int32_t *before)``, which changes the current device. None means the device
            guard that the device has registered with torch.
        allocate: ``int32_t allocate(uint64_t bytes, void **memory)``, which allocates the memory of `opjit_scratch` on the current device.
            The memory must stay valid until the work on the current stream is done. None means a tensor. Outputs are always tensors from
            torch's allocator.
        free: ``int32_t free(void *memory)``, which is called when the kernel has returned. None if `allocate` is None.
    """

    type: str
    header: str
    current: str
    exchange: str | None = None
    allocate: str | None = None
    free: str | None = None


class DeviceCompiler(NamedTuple):
    """The compiler of a device, which compiles kernels in C or C++ to object files.

    The C compiler links the object files with the generated wrapper.

    Attributes:
        command: the name of a program on PATH, or its path. The SHA-256 of the program is part of the key.
        install: the remedy if the compiler is missing, for example ``"install the Toy SDK and put its bin on PATH"``.
        version: the arguments with which the compiler prints its version. The first line of the output is part of the key.
        folders: directories of headers that belong to the compiler. These headers are not part of the key.
    """

    command: str
    install: str
    version: tuple[str, ...] = ("--version",)
    folders: tuple[str, ...] = ()


class Flags(NamedTuple):
    """The flags that compile and link the sources of a backend. Placeholders in braces become paths when a build starts.

    Attributes:
        c: flags for the generated wrapper, and for a kernel that the wrapper includes.
        cuda: flags for a `.cu` kernel. Empty for a backend without CUDA.
        link: linker flags after the objects. ``-lNAME`` is a library that each machine must provide. If you name a library by its path, its
            content is part of the key.
        stubs: the sonames of torch's libraries that the binary links to, without ``.so``.
        needed: all libraries that the binary may need, in addition to the libraries in `link`.
        include: directories on the include path: first the directories of the backend, then the directories of the op.
        device: arguments of `Backend.compiler`. The additional placeholders are ``{source}``, ``{object}`` and ``{path}``. An argument
            with ``{path}`` is repeated for each directory of the include path:
            ``("-fPIC", "-I{path}", "-c", "{source}", "-o", "{object}")``.
        cuda_link: linker flags of an op for CUDA only.
        sources: paths of additional sources of an op.
        shared: torch's CUDA libraries, which `link` names as ``-l:SONAME``.
        debug: True for a binary for debuggers, which is not stripped and contains paths of this machine.
    """

    c: tuple[str, ...]
    cuda: tuple[str, ...]
    link: tuple[str, ...]
    stubs: tuple[str, ...]
    needed: frozenset[str]
    include: tuple[str, ...] = ()
    cuda_link: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    shared: tuple[Shared, ...] = ()
    debug: bool = False
    device: tuple[str, ...] = ()


class Clock(Protocol):
    """Measures calls on a device with the streams, events and graphs of torch.cuda. For other devices, opjit uses the clock of the CPU."""

    def cache_bytes(self) -> int:
        """Return the bytes of the last-level cache."""

    def megahertz(self) -> int | None:
        """Read the current clock of the cores, or return None."""

    def peaks(self, element_size: int) -> tuple[float, float]:
        """Return the peak rates in bytes and operations per second, for elements of a size. 0 means unknown."""

    def model(self, index: int | None = None) -> str:
        """Return the model of a device. None means the current device."""


class Backend(Protocol):
    """The protocol of a backend, which supports one kind of device.

    Two more attributes are optional: `clock`, a `Clock` or None, and `entry`, a method that makes the binary of an op (see
    `opjit.request`).

    Attributes:
        name: the name of the backend, with which the names of kernels end, for example ``allreduce_<name>``.
        device_type: the value of ``torch.device.type``.
        dispatch_key: torch's dispatch key for kernels on the device.
        suffix: the suffix of an op's source for this backend, for example ``".c"`` or ``".toy.c"``. Each backend needs a different suffix.
        kernels: a directory with kernels for ops that you can't change, ``<kernels>/<namespace>/<op><suffix>``. opjit uses it if the
            directory of the op does not contain a source with that suffix. None means no such directory.
        stream: the last parameter of a kernel. None for a device without streams.
        compiler: the compiler of the kernels. None means the C compiler or, with `uses_nvcc`, the CUDA compiler.
        uses_nvcc: True if a build needs a CUDA compiler.
    """

    name: str
    device_type: str
    dispatch_key: str
    suffix: str
    kernels: Path | None
    stream: Stream | None
    compiler: DeviceCompiler | None
    uses_nvcc: bool

    def available(self) -> str | None:
        """Return None if this process can run kernels, otherwise the missing part."""

    def host_arch(self) -> str:
        """Return the architecture for kernels of this process. It is called only if the device is available."""

    def archs(self) -> Iterable[str]:
        """Return all architectures, for messages and completion."""

    def takes(self, arch: str) -> bool:
        """Return whether `arch` is an architecture of this backend."""

    def runs(self, arch: str) -> bool:
        """Return whether this process can run kernels for `arch`. It is called only if the device is available."""

    def runtime(self, cuda_version: str | None) -> str:
        """Return the runtime that a binary needs, for example ``"cuda13"``, or an empty string."""

    def flags(self, arch: str, runtime: str) -> Flags:
        """Return the flags that compile and link for `arch`."""


_backends = dict[str, Backend]()


def register_backend(backend: Backend) -> None:
    """Add the backend of a device, or replace the backend of the same name.

    Example:
        >>> from opjit.backends.cpu import Cpu
        >>> class Toy(Cpu):  # kernels are C functions, like on the CPU
        ...     name = device_type = "toy"
        ...     dispatch_key, suffix = "PrivateUse1", ".toy.c"
        >>> opjit.register_backend(Toy())  # any object with the attributes of `opjit.backends.Backend`
    """
    _backends[backend.name] = backend


def all_backends() -> list[Backend]:
    """Return all backends in the order of their registration: `cpu`, `cuda`, then the other backends."""
    return list(_backends.values())


def by_name(name: object) -> Backend | None:
    """Return the backend of a name, which may come from a manifest."""
    return next((backend for backend in all_backends() if backend.name == name), None)


def for_device(device_type: str) -> Backend:
    """Return the backend of a ``torch.device.type``. Raises UnknownDevice if it does not exist."""
    for backend in all_backends():
        if device_type in (backend.name, backend.device_type):
            return backend
    names = ", ".join(backend.name for backend in all_backends())
    raise UnknownDevice(
        f"no backend for device {device_type!r}; there are: {names}. A package can add one with "
        "opjit.register_backend"
    )


def clock_of(device_type: str) -> Clock | None:
    """Return the clock of a device, or None if the clock of the CPU measures its calls."""
    clock: Clock | None = getattr(for_device(device_type), "clock", None)
    return clock


def for_dispatch_key(key: str) -> Backend | None:
    return next((backend for backend in all_backends() if backend.dispatch_key == key), None)


def serving(backend: Backend, sources: Sequence[str]) -> Backend:
    """Return the backend with the kernel for another one's tensors, for an op that has sources for the backends in `sources`.

    It is the same backend, unless a later one has its dispatch key and a source: the emulated device that `opjit.emulate` registers.
    """
    key = backend.dispatch_key
    found = [each for each in all_backends() if each.dispatch_key == key and each.name in sources]
    return found[-1] if found else backend


def of_source(path: str) -> Backend | None:
    """Return the backend that compiles a source, by its suffix; the longest suffix counts."""
    found = [backend for backend in all_backends() if path.endswith(backend.suffix)]
    return max(found, key=lambda backend: len(backend.suffix), default=None)

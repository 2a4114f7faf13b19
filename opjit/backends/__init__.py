"""Backends: how to build and run kernels on a kind of device. opjit has `cpu` and `cuda`.

A package adds another device with `opjit.register_backend`; see examples/09_own_device.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from opjit.errors import UnknownDevice


class Shared(NamedTuple):
    """A CUDA library that torch needs itself: its soname, and its path here."""

    soname: str
    path: str


class Stream(NamedTuple):
    """A device's stream, which a kernel gets as its last parameter, and the C functions that the glue calls around a kernel.

    The functions belong to torch or to a library that `Flags.link` names. Each returns 0 for success; the code of a failure is part of the
    RuntimeError.

    Attributes:
        type: its type in C: a pointer, or an integer of its size, such as ``"cudaStream_t"``.
        header: declares `type`; found on the include path.
        current: ``int32_t current(int32_t device_index, void **stream)``, the current stream of a device.
        exchange: ``int32_t exchange(int32_t device_index, int32_t *before)``, makes a device the current one; None means the device guard
            that the device has registered with torch.
        allocate: ``int32_t allocate(uint64_t bytes, void **memory)``, for `opjit_scratch`: memory on the current device until the work that
            is now on its current stream is done; None means a tensor. Outputs are always tensors, made by torch's allocator for the device.
        free: ``int32_t free(void *memory)``, called when the kernel has returned; None if `allocate` is None.
    """

    type: str
    header: str
    current: str
    exchange: str | None = None
    allocate: str | None = None
    free: str | None = None


class DeviceCompiler(NamedTuple):
    """The compiler of a device: it makes object files of kernels, in C or C++, which the C compiler links with the glue.

    Attributes:
        command: a program on PATH, or its path. SHA-256 of the file is part of the key.
        install: the remedy if the compiler is missing, for example ``"install the Toy SDK and put its bin on PATH"``.
        version: arguments with which it prints its version; the first line of it is part of the key.
        folders: the directories of headers that belong to the compiler, which are therefore not part of the key.
    """

    command: str
    install: str
    version: tuple[str, ...] = ("--version",)
    folders: tuple[str, ...] = ()


class Flags(NamedTuple):
    """How a backend's sources are compiled and linked. Placeholders in braces become paths when a build starts.

    Attributes:
        c: flags for the C glue, and for a kernel that the glue includes.
        cuda: flags for a `.cu` kernel; empty for a backend without one.
        link: after the objects. ``-lNAME`` is a library that each machine has; a path's content is part of the key.
        stubs: torch's libraries that the binary links to: their sonames, without ``.so``.
        needed: all libraries that the binary may need, in addition to the ones in `link`.
        include: directories on the include path: first the backend's directories, and then the directories of the op.
        device: arguments of `Backend.compiler`. The additional placeholders are ``{source}``, ``{object}``, ``{dependencies}``
            (the list of read files, which the compiler must write in the syntax of make) and ``{path}``. An argument with
            ``{path}`` is repeated for each directory of the include path:
            ``("-fPIC", "-I{path}", "-MD", "-MF", "{dependencies}", "-c", "{source}", "-o", "{object}")``.
        cuda_link: an author's linker flags for CUDA only.
        sources: paths of sources that an op's author adds to the kernel.
        shared: torch's CUDA libraries, which `link` names as ``-l:SONAME``.
        debug: the binary is for debuggers: not stripped, and with paths of this machine.
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
    """Measures calls on a device with the streams, events and graphs of torch.cuda; other devices are measured by the host's clock."""

    def cache_bytes(self) -> int:
        """Return the size of the cache before the memory."""

    def megahertz(self) -> int | None:
        """Read the current clock of the cores, or return None."""

    def peaks(self, element_size: int) -> tuple[float, float]:
        """Return the highest bytes and operations per second, for elements of a size; 0 for unknown."""

    def model(self, index: int | None = None) -> str:
        """Return the name of a device; None is the current one."""


class Backend(Protocol):
    """One kind of device.

    It may also have `clock`, a `Clock` or None, and `entry`, a method that makes an op's binary; see `clock_of` and `opjit.request`.

    Attributes:
        name: the suffix of its kernels' names, ``allreduce_<name>``.
        device_type: ``torch.device.type``.
        dispatch_key: torch's key for kernels on it.
        suffix: the suffix of an op's source for this backend, for example ``".c"`` or ``".toy.c"``. No two backends may have the same.
        kernels: a directory with kernels for ops of other authors,
            ``<kernels>/<namespace>/<op><suffix>``; used if the op's folder does not contain a
            source with that suffix. None if the backend does not have one.
        stream: the last parameter of a kernel. None for a device without streams.
        compiler: the compiler of the kernels; None for the C compiler or, with `uses_nvcc`, CUDA's.
        uses_nvcc: whether a build needs the CUDA toolkit.
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
        """Return the arch to build kernels of this process for. Called only if available."""

    def archs(self) -> Iterable[str]:
        """Return all archs, for messages and completion."""

    def takes(self, arch: str) -> bool:
        """Return whether `arch` is an arch of this backend."""

    def runs(self, arch: str) -> bool:
        """Return whether this process can run kernels built for `arch`. Called only if available."""

    def runtime(self, cuda_version: str | None) -> str:
        """Return the runtime that a binary depends on, as in its folder's name: ``"cuda13"``, or an empty string."""

    def flags(self, arch: str, runtime: str) -> Flags:
        """How to compile and link for `arch`."""


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Add the backend of a device, or replace the backend of the same name.

    Example:
        >>> from opjit.backends.cpu import Cpu
        >>> class Toy(Cpu):  # kernels are C functions on the host, as the CPU's are
        ...     name = device_type = "toy"
        ...     dispatch_key, suffix = "PrivateUse1", ".toy.c"
        >>> opjit.register_backend(Toy())  # any object with the attributes of `opjit.backends.Backend` will do
    """
    _backends[backend.name] = backend


def all_backends() -> list[Backend]:
    """Return all backends in the order of their registration: `cpu`, `cuda`, then the other backends."""
    return list(_backends.values())


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
    """Return the clock of a device; None if the host's clock measures calls on it."""
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

"""Backends: how to build for a kind of device, and what it can run. opjit has `cpu` and `cuda`; a package adds its own device with
`opjit.register_backend`, as examples/out_of_tree_device does."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from opjit.errors import UnknownDevice


class Flags(NamedTuple):
    """How a backend's sources are compiled and linked. Placeholders in braces become paths when a build starts.

    Attributes:
        c: for the C glue, and for a kernel that the glue includes.
        cuda: for a `.cu` kernel; empty for a backend without one.
        link: after the objects.
        stubs: torch's libraries that the binary links to: their sonames, without ``.so``.
        needed: all libraries that the binary may need, besides those that `link` names.
        include: folders that an op's author adds to the include path.
    """

    c: tuple[str, ...]
    cuda: tuple[str, ...]
    link: tuple[str, ...]
    stubs: tuple[str, ...]
    needed: frozenset[str]
    include: tuple[str, ...] = ()


class Backend(Protocol):
    """One kind of device.

    Attributes:
        name: as in the kernel's name, ``allreduce_<name>``.
        device_type: ``torch.device.type``.
        dispatch_key: torch's key for kernels on it.
        suffix: of an op's source for this backend, such as ``".c"`` or ``".toy.c"``; each backend has its own.
        kernels: a folder with a device's own kernels for other authors' ops, ``<kernels>/<namespace>/<op><suffix>``; used if the
            op's folder has no source with that suffix. None for no such folder.
        stream: C type of a kernel's last parameter, its stream; None for a plain C kernel.
        uses_nvcc: whether a build needs the CUDA toolkit.
    """

    name: str
    device_type: str
    dispatch_key: str
    suffix: str
    kernels: Path | None
    stream: str | None
    uses_nvcc: bool

    def available(self) -> str | None:
        """None if this process can run kernels; else what is missing."""

    def host_arch(self) -> str:
        """The arch to build kernels of this process for. Called only if available."""

    def archs(self) -> Iterable[str]:
        """All archs, for messages and completion."""

    def takes(self, arch: str) -> bool:
        """Whether `arch` is an arch of this backend."""

    def runs(self, arch: str) -> bool:
        """Whether this process can run kernels built for `arch`. Called only if available."""

    def runtime(self, cuda_version: str | None) -> str:
        """The runtime that a binary depends on, as in its folder's name: ``"cuda13"``, or an empty string."""

    def flags(self, arch: str, runtime: str) -> Flags:
        """How to compile and link for `arch`."""


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Add a backend, or replace the one of the same name.

    Example:
        >>> opjit.register_backend(MyDevice())  # an object with the attributes of `opjit.backends.Backend`
    """
    _backends[backend.name] = backend


def all_backends() -> list[Backend]:
    """All backends in the order of their registration: `cpu`, `cuda`, then others."""
    return list(_backends.values())


def for_device(device_type: str) -> Backend:
    """The backend of a ``torch.device.type``.

    Raises:
        UnknownDevice: there is none.
    """
    for backend in all_backends():
        if device_type in (backend.name, backend.device_type):
            return backend
    known = ", ".join(backend.name for backend in all_backends())
    raise UnknownDevice(f"no backend for device {device_type!r}; there are: {known}. A package can add one with "
                        "opjit.register_backend")


def for_dispatch_key(key: str) -> Backend | None:
    return next((backend for backend in all_backends() if backend.dispatch_key == key), None)

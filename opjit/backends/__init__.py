"""Backends: what opjit needs to know of a kind of device. `cpu` and `cuda` are two of them; a third party adds one with
`opjit.register_backend` for a device of its own, without touching opjit; examples/out_of_tree_device does."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from opjit.errors import UnknownDevice


class Flags(NamedTuple):
    """How a backend's sources are compiled and linked. Placeholders in braces become paths only when a build starts.

    Attributes:
        c: for the C glue, and for the kernel where the glue includes it.
        cuda: for the `.cu` kernel; empty where there is none.
        link: behind the objects.
        stubs: sonames of torch's libraries that the binary shall ask for, without ``.so``.
        needed: every library that the binary may ask for, besides those that `link` names.
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
        suffix: of an op's source for it, such as ``".c"``; another one for each backend, ``".toy.c"``.
        kernels: a folder with sources for ops whose own folder has none with that suffix, ``<kernels>/<namespace>/<op><suffix>``:
            so a device brings kernels for ops that do not know of it. None for no such folder.
        stream: C type of the stream a kernel takes last; None for a plain C kernel.
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
        """None if this process can run kernels; else one sentence that says what is missing."""

    def host_arch(self) -> str:
        """The arch that kernels for this process are built for. Called only when available."""

    def archs(self) -> Iterable[str]:
        """Archs that can be built for, for messages and completion."""

    def takes(self, arch: str) -> bool:
        """Whether `arch` is one that can be built for."""

    def runs(self, arch: str) -> bool:
        """Whether this process can run kernels that were built for `arch`. Called only when available."""

    def runtime(self, cuda_version: str | None) -> str:
        """What else a binary depends on, as part of its folder's name: ``"cuda13"``, or an empty string."""

    def flags(self, arch: str, runtime: str) -> Flags:
        """How to compile and link for `arch`."""


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Add a backend, or replace the one of that name.

    Example:
        >>> opjit.register_backend(MyDevice())  # an object with the attributes of `opjit.backends.Backend`
    """
    _backends[backend.name] = backend


def all_backends() -> list[Backend]:
    """In the order they were registered: `cpu`, `cuda`, then others."""
    return list(_backends.values())


def for_device(device_type: str) -> Backend:
    """The backend of a ``torch.device.type``.

    Raises:
        UnknownDevice: none serves it.
    """
    for backend in all_backends():
        if device_type in (backend.name, backend.device_type):
            return backend
    known = ", ".join(backend.name for backend in all_backends())
    raise UnknownDevice(f"no backend for device {device_type!r}; there are: {known}. A backend for another device is added "
                        "with opjit.register_backend")


def for_dispatch_key(key: str) -> Backend | None:
    return next((backend for backend in all_backends() if backend.dispatch_key == key), None)

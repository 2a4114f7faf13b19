"""Targets of a build: a backend and an arch."""

import os
from typing import NamedTuple

from opjit import backends
from opjit.backends import Backend
from opjit.errors import DeviceUnavailable, UnknownArch, UnknownDevice


class Target(NamedTuple):
    """A backend, one of its archs, and the runtime that its binaries need (``"cuda13"``, or an empty string)."""

    backend: Backend
    arch: str
    runtime: str = ""

    def __str__(self) -> str:
        return f"{self.backend.name} {self.folder}"

    @property
    def folder(self) -> str:
        """The target's folder in the store: ``x86-64-v3``, ``sm_90.cuda13``."""
        return f"{self.arch}.{self.runtime}" if self.runtime else self.arch


def device_type(device: object) -> str:
    """The type of a device that a user names; None is the current accelerator, else the CPU.

    Raises:
        UnknownDevice: neither torch nor opjit knows it.
    """
    import torch  # late: the command's help and versions do without

    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator.type if accelerator is not None else "cpu"
    if isinstance(device, torch.device):
        return device.type
    name, colon, index = str(device).partition(":")
    if name in {backend.name for backend in backends.all_backends()} and index.isdecimal() == bool(colon):
        return name
    try:
        return torch.device(str(device)).type
    except RuntimeError:
        known = ", ".join(backend.name for backend in backends.all_backends())
        raise UnknownDevice(f"expected a device such as 'cpu' or 'cuda', got {device!r}; backends: {known}") from None


def here(backend: Backend) -> Target:
    """The target of kernels for this process.

    Raises:
        DeviceUnavailable: this process has no such device.
    """
    missing = backend.available()
    if missing:
        raise DeviceUnavailable(missing)
    override = os.environ.get("OPJIT_ARCH")
    if override:
        named(override)  # raises for an unknown arch
    arch = override if override and backend.takes(override) else backend.host_arch()
    return Target(backend, arch, backend.runtime(None))


def named(arch: str, backend: Backend | None = None, cuda_version: str | None = None) -> Target:
    """The target of a named arch, such as ``"sm_90"``, independent of this machine.

    Args:
        cuda_version: of the toolkit for the build; None is the version of torch's.

    Raises:
        UnknownArch: no backend has it.
    """
    candidates = [backend] if backend is not None else backends.all_backends()
    for candidate in candidates:
        if candidate.takes(arch):
            return Target(candidate, arch, candidate.runtime(cuda_version))
    known = ", ".join(name for candidate in candidates for name in candidate.archs())
    raise UnknownArch(f"unknown arch {arch!r}; known: {known}")

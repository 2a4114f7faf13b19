"""What an op is built for: a backend and an arch."""

import os
from typing import NamedTuple

import torch

from opjit import backends
from opjit.backends import Backend
from opjit.errors import DeviceUnavailable, UnknownArch, UnknownDevice


class Target(NamedTuple):
    """A backend, an arch of it, and the version of a runtime that its binaries need (``"cuda13"``, or nothing)."""

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
    """The kind of device that a user means: None is the current accelerator, else the CPU.

    Raises:
        UnknownDevice: it is nothing that torch or opjit knows as a device.
    """
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
    """The target of kernels that run in this process.

    Raises:
        DeviceUnavailable: there is no such device here.
    """
    missing = backend.available()
    if missing:
        raise DeviceUnavailable(missing)
    override = os.environ.get("OPJIT_ARCH")
    if override:
        named(override)  # or it is an arch that nobody builds for
    arch = override if override and backend.takes(override) else backend.host_arch()
    return Target(backend, arch, backend.runtime(None))


def named(arch: str, backend: Backend | None = None, cuda_version: str | None = None) -> Target:
    """The target of an arch by its name, such as ``"sm_90"``, whatever this machine has.

    Args:
        cuda_version: of the toolkit that will build it; asked for only by name, not looked for.

    Raises:
        UnknownArch: no backend builds for it.
    """
    candidates = [backend] if backend is not None else backends.all_backends()
    for candidate in candidates:
        if candidate.takes(arch):
            return Target(candidate, arch, candidate.runtime(cuda_version))
    known = ", ".join(name for candidate in candidates for name in candidate.archs())
    raise UnknownArch(f"unknown arch {arch!r}; known: {known}")

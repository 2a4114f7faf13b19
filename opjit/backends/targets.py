"""Targets of a build: a backend and an arch."""

import os
import platform
from typing import NamedTuple

from opjit import backends
from opjit.backends import Backend, cpu
from opjit.errors import DeviceUnavailable, UnknownArch, UnknownDevice


class Target(NamedTuple):
    """A backend, one of its archs, the runtime that its binaries need, and the machine that runs them."""

    backend: Backend
    arch: str
    runtime: str = ""  # such as "cuda13", or an empty string
    host: str = platform.machine()  # the processor of the glue: "x86_64" or "aarch64"

    def __str__(self) -> str:
        return f"{self.backend.name} {self._device}" + (
            f" on {self.host}" if self.host != host_of(self.arch) else ""
        )

    @property
    def folder(self) -> str:
        """The target's folder in the store: ``x86-64-v3``, ``sm_90.cuda13.x86_64``. A CPU's arch names the host."""
        return self._device if cpu.machine_of(self.arch) else f"{self._device}.{self.host}"

    @property
    def _device(self) -> str:
        return f"{self.arch}.{self.runtime}" if self.runtime else self.arch


def host_of(arch: str, host: str | None = None) -> str:
    """Return the host CPU of a wrapper: for a CPU architecture its host CPU, otherwise the given one or this machine's."""
    return cpu.machine_of(arch) or host or platform.machine()


def device_type(device: object) -> str:
    """Return the type of a device that a user names.

    None means the accelerator, or the CPU. Raises UnknownDevice if no backend supports it.
    """
    import torch  # late: the command's help and versions do without

    if device is None:
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        return accelerator.type if accelerator is not None else "cpu"
    if isinstance(device, torch.device):
        return device.type
    name, colon, index = str(device).partition(":")
    if name in {backend.name for backend in backends.all_backends()} and index.isdecimal() == bool(
        colon
    ):
        return name
    try:
        return torch.device(str(device)).type
    except RuntimeError:
        names = ", ".join(backend.name for backend in backends.all_backends())
        raise UnknownDevice(
            f"expected a device such as 'cpu' or 'cuda', got {device!r}; backends: {names}"
        ) from None


def here(backend: Backend) -> Target:
    """Return the target of kernels for this process.

    Raises DeviceUnavailable if it cannot use a device of the backend.
    """
    missing = backend.available()
    if missing:
        raise DeviceUnavailable(missing)
    override = os.environ.get("OPJIT_ARCH")
    if override:
        of = named(override).host  # raises for an unknown arch
        if of != platform.machine():
            raise UnknownArch(
                f"OPJIT_ARCH is {override!r}, which is for {of}, and this machine is {platform.machine()}; unset it here, "
                f"and build for {of} with `opjit precompile --arch {override}`"
            )
    arch = override if override and backend.takes(override) else backend.host_arch()
    return Target(backend, arch, backend.runtime(None), host_of(arch))


def named(
    arch: str,
    backend: Backend | None = None,
    cuda_version: str | None = None,
    host: str | None = None,
) -> Target:
    """Return the target of a named arch, such as ``"sm_90"``, independent of this machine, for a version of the toolkit (None is torch's)
    and a processor, see `host_of`. Raises UnknownArch if no backend has it."""
    if host not in (None, *cpu.MACHINES):
        raise UnknownArch(f"unknown host {host!r}; known: {', '.join(cpu.MACHINES)}")
    candidates = [backend] if backend is not None else backends.all_backends()
    for candidate in candidates:
        if candidate.takes(arch):
            return Target(candidate, arch, candidate.runtime(cuda_version), host_of(arch, host))
    names = ", ".join(name for candidate in candidates for name in candidate.archs())
    raise UnknownArch(f"unknown arch {arch!r}; known: {names}")

"""The CUDA archs to build an extension for."""

from __future__ import annotations

import os
import re

import torch

from opjit.errors import UnknownArch


def cuda_archs(name: str, flags: list[str]) -> str:
    """Return the archs to compile CUDA code for, in the format of TORCH_CUDA_ARCH_LIST; empty if the flags name them.

    Args:
        name: the extension's.
        flags: those for the CUDA compiler.

    Raises:
        UnknownArch: neither the environment nor a GPU determines the archs.
    """
    if any("arch" in flag for flag in flags if "TORCH_EXTENSION_NAME" not in flag):
        return ""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed and listed != "native":
        return listed
    named = [re.fullmatch(r"sm_(\d+)(\d)([af]?)", part) for part in os.environ.get("OPJIT_ARCH", "").split("+")]
    if all(named):
        return ";".join(f"{part[1]}.{part[2]}{part[3]}" for part in named if part)
    if torch.cuda.device_count() == 0:
        raise UnknownArch(f"{name} has CUDA code, but no GPU is visible and no arch is set: set TORCH_CUDA_ARCH_LIST=9.0 or "
                          "OPJIT_ARCH=sm_90, or add -gencode flags to extra_cuda_cflags")
    return _visible_archs()


def _visible_archs() -> str:
    """Return the archs of the visible GPUs, capped at the newest that torch supports, and PTX for later ones."""
    newest = max((int(number[0]) // 10, int(number[0]) % 10) for arch in torch.cuda.get_arch_list()
                 if (number := re.findall(r"^sm_(\d+)", arch)))
    found = sorted({min(newest, capability) for capability in capabilities()})
    return ";".join(f"{major}.{minor}" for major, minor in found) + "+PTX"


def capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of the visible GPUs, without duplicates."""
    return sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})

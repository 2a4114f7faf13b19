"""The CUDA archs that an extension is compiled for: those that its flags or the environment name, else the visible GPUs'."""

import os
import re

import torch

from opjit.errors import UnknownArch


def chosen(name: str, flags: list[str]) -> str:
    """The archs that CUDA code is compiled for, as TORCH_CUDA_ARCH_LIST names them.

    Args:
        name: of the extension.
        flags: for the CUDA compiler.

    Raises:
        UnknownArch: nothing says which.
    """
    if any("arch" in flag for flag in flags if "TORCH_EXTENSION_NAME" not in flag):
        return ""  # torch's builder adds none then
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed and listed != "native":
        return listed
    named = [re.fullmatch(r"sm_(\d+)(\d)([af]?)", part) for part in os.environ.get("OPJIT_ARCH", "").split("+")]
    if all(named):
        return ";".join(f"{part[1]}.{part[2]}{part[3]}" for part in named if part)
    if torch.cuda.device_count() == 0:
        raise UnknownArch(f"{name} is compiled for CUDA, but no GPU is visible that says for which arch: set "
                          "TORCH_CUDA_ARCH_LIST=9.0 or OPJIT_ARCH=sm_90, or name it in extra_cuda_cflags")
    return _visible()


def _visible() -> str:
    """The visible GPUs' archs, none newer than what torch itself was compiled for, and code that later ones can translate."""
    newest = max((int(number[0]) // 10, int(number[0]) % 10) for arch in torch.cuda.get_arch_list()
                 if (number := re.findall(r"^sm_(\d+)", arch)))
    found = sorted({min(newest, capability) for capability in capabilities()})
    return ";".join(f"{major}.{minor}" for major, minor in found) + "+PTX"


def capabilities() -> list[tuple[int, int]]:
    """Of the visible GPUs, each once."""
    return sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})

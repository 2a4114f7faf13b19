"""CUDA: a `.cu` file compiled by nvcc beside the C glue. Builds need neither a GPU nor a CUDA build of torch."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from opjit.backends import Flags
from opjit.backends.cpu import GLUE, NEEDED, PREFIX_MAPS


class Cuda:
    name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    suffix = ".cu"
    kernels: Path | None = None
    stream: str | None = "cudaStream_t"
    uses_nvcc = True

    def available(self) -> str | None:
        if torch.version.cuda is None:
            return (f"torch {torch.__version__} is a build without CUDA; install a CUDA build of torch to run the op, or build it "
                    "without running it: opjit get OP --arch sm_90")
        if not torch.cuda.is_available():
            return "no CUDA GPU is visible to torch; build the op without running it: opjit get OP --arch sm_90"
        return None

    def host_arch(self) -> str:
        """All visible GPUs' archs, joined: one binary serves each of them."""
        found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        return "+".join(f"sm_{major}{minor}" for major, minor in sorted(found))

    def archs(self) -> list[str]:
        return ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]

    def takes(self, arch: str) -> bool:
        return all(re.fullmatch(r"sm_\d{2,3}[af]?", part) for part in arch.split("+"))

    def runs(self, arch: str) -> bool:
        """Code for sm_86 runs on 8.6 and on later minor versions; the code of each visible GPU must be there."""
        found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        return all(any(_serves(part, major, minor) for part in arch.split("+")) for major, minor in found)

    def runtime(self, cuda_version: str | None) -> str:
        """The binary asks for libcudart.so.<major>, so the major is part of what it is."""
        version = cuda_version or torch.version.cuda
        return f"cuda{version.partition('.')[0]}" if version else ""

    def flags(self, arch: str, runtime: str) -> Flags:
        numbers = [part.removeprefix("sm_") for part in arch.split("+")]
        c = ("-x", "c", "-std=gnu11", "-O2", *GLUE)
        # torch takes CUDA's own arithmetic of half and bfloat16 away, for the sake of its C++ types, which an op does not have.
        arithmetic = (f"-U__CUDA_NO_{what}__" for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"))
        # Four threads of the device compilers take turns at the kernels; the binary depends on their number, so it is the same on
        # every machine. The seed takes the place of a random one in the names that nvcc makes up. -O1 is for the host's part, which
        # launches kernels and is read faster so; those are optimised in any case.
        cuda = ("-std=c++17", "-O1", "--split-compile=4", "--frandom-seed=opjit", *arithmetic,
                *(f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers),
                "-Xcompiler", "-fvisibility=hidden", "-Xcompiler", "-Werror=return-type", "-Xcompiler", "-Werror=unused-result",
                *(part for flag in PREFIX_MAPS for part in ("-Xcompiler", flag)),
                "-MD", "-MF", "opjit_kernel.deps")
        needed = NEEDED | {"libtorch_cuda.so", "libstdc++.so.6", f"libcudart.so.{runtime.removeprefix('cuda')}"}
        return Flags(c, cuda, ("-lstdc++", "-lm"), ("libtorch_cpu", "libtorch_cuda"), needed)


def _serves(part: str, major: int, minor: int) -> bool:
    """Whether the code of one arch runs on a GPU; ``sm_90a`` runs on that chip only."""
    number = int(part.removeprefix("sm_").rstrip("af"))
    exact = number == major * 10 + minor
    return exact or (not part.endswith("a") and number // 10 == major and number % 10 < minor)

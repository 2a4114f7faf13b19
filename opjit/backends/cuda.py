"""CUDA: a `.cu` file compiled by nvcc, next to the C glue. Builds need neither a GPU nor a CUDA build of torch."""

import re
from pathlib import Path

import torch

from opjit.backends import Clock, DeviceCompiler, Flags, Stream
from opjit.backends.cpu import GLUE, NEEDED, PREFIX_MAPS

# For messages and completion. Any other number of a GPU is accepted, see recipe/gpu_archs.py.
_ARCHS = "sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_100 sm_103 sm_110 sm_120 sm_121"


class Cuda:
    name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    suffix = ".cu"
    kernels: Path | None = None
    stream: Stream | None = Stream(
        "cudaStream_t",
        "opjit_cuda.h",
        "aoti_torch_get_current_cuda_stream",
        allocate="aoti_torch_cuda_caching_allocator_raw_alloc",
        free="aoti_torch_cuda_caching_allocator_raw_delete",
    )
    compiler: DeviceCompiler | None = None
    uses_nvcc = True

    @property
    def clock(self) -> Clock:
        from opjit.backends.nvidia import NvidiaClock

        return NvidiaClock()

    def available(self) -> str | None:
        if torch.version.cuda is None:
            return (
                f"torch {torch.__version__} is a build without CUDA; install a CUDA build of torch to run the op, or only build it: "
                "opjit get OP --arch sm_90"
            )
        if not torch.cuda.is_available():
            return "no CUDA GPU is visible to torch; you can still build the op: opjit get OP --arch sm_90"
        return None

    def host_arch(self) -> str:
        """Return the archs of all visible GPUs, joined: one binary for all of them."""
        return "+".join(f"sm_{major}{minor}" for major, minor in capabilities())

    def archs(self) -> list[str]:
        return _ARCHS.split()

    def takes(self, arch: str) -> bool:
        return all(re.fullmatch(r"sm_\d{2,3}[af]?", part) for part in arch.split("+"))

    def runs(self, arch: str) -> bool:
        """Return whether each visible GPU has code: for its capability, or for an earlier minor version of it."""
        return all(
            any(_serves(part, *capability) for part in arch.split("+"))
            for capability in capabilities()
        )

    def runtime(self, cuda_version: str | None) -> str:
        """Return the CUDA major version: the binary needs libcudart.so.<major>."""
        version = cuda_version or torch.version.cuda
        return f"cuda{version.partition('.')[0]}" if version else ""

    def flags(self, arch: str, runtime: str) -> Flags:
        numbers = [part.removeprefix("sm_") for part in arch.split("+")]
        c = ("-x", "c", "-std=gnu11", "-O2", *GLUE)
        # torch disables CUDA's arithmetic of half and bfloat16 in favor of C++ types of torch, which an op does not have.
        arithmetic = (
            f"-U__CUDA_NO_{what}__"
            for what in (
                "HALF_OPERATORS",
                "HALF_CONVERSIONS",
                "HALF2_OPERATORS",
                "BFLOAT16_CONVERSIONS",
            )
        )
        # --frandom-seed: replaces a random seed in names that nvcc generates. -O1: for the host code, which only launches kernels; device
        # code is always optimized. No --split-compile: the order of the kernels in the binary would differ between two builds.
        cuda = (
            "-std=c++17",
            "-O1",
            "--frandom-seed=opjit",
            *arithmetic,
            *(f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers),
            "-Xcompiler",
            "-fvisibility=hidden",
            "-Xcompiler",
            "-Werror=return-type",
            "-Xcompiler",
            "-Werror=unused-result",
            *(part for flag in PREFIX_MAPS for part in ("-Xcompiler", flag)),
        )
        needed = NEEDED | {
            "libtorch_cuda.so",
            "libstdc++.so.6",
            f"libcudart.so.{runtime.removeprefix('cuda')}",
        }
        return Flags(c, cuda, ("-lstdc++", "-lm"), ("libtorch_cpu", "libtorch_cuda"), needed)


def capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of the visible GPUs, without duplicates."""
    return sorted(
        {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    )


def _serves(part: str, major: int, minor: int) -> bool:
    """Return whether code for an arch runs on a GPU; ``sm_90a`` runs on capability 9.0 only."""
    number = int(part.removeprefix("sm_").rstrip("af"))
    exact = number == major * 10 + minor
    return exact or (not part.endswith("a") and number // 10 == major and number % 10 < minor)

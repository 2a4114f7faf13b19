"""The CPU: plain C, compiled for one of the x86-64 levels, so that one cache serves different machines safely."""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

from opjit.backends import Flags

# The x86-64 psABI levels, best first, with the /proc/cpuinfo flags that each adds. A level, not -march=native: compilers
# name a CPU by its family, and the name does not say which instructions the machine at hand really allows.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"},
}
_AARCH64 = "aarch64"
# What of /proc/cpuinfo tells one kind of CPU from another.
_MAKE = {"vendor_id", "cpu family", "model", "cache size", "flags",
         "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"}

NEEDED = frozenset({"libtorch_cpu.so", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"})

# Mistakes that C forgives and that would only show when the library is loaded, or as a crash.
STRICT = ("-Werror=implicit-function-declaration", "-Werror=implicit-int", "-Werror=int-conversion",
          "-Werror=incompatible-pointer-types", "-Werror=return-type", "-Werror=unused-result")
# No folder of the machine may reach the binary: __FILE__ becomes the plain file name.
# The last map that fits is taken: an op's folder may lie inside the include folder.
PREFIX_MAPS = ("-ffile-prefix-map={staging}/=", "-ffile-prefix-map={include}/=", "-ffile-prefix-map={folder}/=")
# Every file that the compiler reads, system headers too, for the check after the build (torch's own rule keeps no such list).
DEPENDENCIES = "-Wp,-MD,{unique}.deps"
# For every glue. Torch's exceptions pass through it, so it is compiled with -fexceptions; torch calls nothing but what is exported.
GLUE = ("-pipe", "-fexceptions", "-fvisibility=hidden", "-fno-plt", *STRICT, *PREFIX_MAPS, DEPENDENCIES)


class Cpu:
    name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    suffix = ".c"
    kernels: Path | None = None
    stream: str | None = None
    uses_nvcc = False

    def available(self) -> str | None:
        return None if platform.machine() in ("x86_64", "aarch64") else (
            f"opjit builds for x86-64 and aarch64, and this machine is {platform.machine()}")

    def host_arch(self) -> str:
        return _host_arch()

    def archs(self) -> list[str]:
        return [*_LEVELS, _AARCH64]

    def takes(self, arch: str) -> bool:
        return arch in self.archs()

    def runs(self, arch: str) -> bool:
        """Each x86-64 level includes the ones below it."""
        known = list(_LEVELS)
        host = self.host_arch()
        return arch == host or (arch in known and host in known and known.index(arch) >= known.index(host))

    def runtime(self, cuda_version: str | None) -> str:
        return ""

    def flags(self, arch: str, runtime: str) -> Flags:
        march = "armv8-a" if arch == _AARCH64 else arch
        c = ("-x", "c", "-std=gnu11", "-O3", f"-march={march}", *GLUE)
        return Flags(c, (), ("-lm",), ("libtorch_cpu",), NEEDED)


@cache
def _host_arch() -> str:
    if platform.machine() == _AARCH64:
        return _AARCH64
    flags = _cpu_flags()
    best = "x86-64-v2"
    for level in reversed(_LEVELS):  # each level includes the ones below
        if not _LEVELS[level] <= flags:
            break
        best = level
    return best


def identity() -> str:
    """What -march=native is taken from: the CPUs' make, caches and flags, as SHA-256."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as cpuinfo:
        lines = [line for line in iter(cpuinfo.readline, "") if line.partition(":")[0].strip() in _MAKE]
    return hashlib.sha256("".join(sorted(set(lines))).encode()).hexdigest()


def _cpu_flags() -> set[str]:
    """The first CPU's flags; none where nothing tells them, as in a chroot without /proc. Only the first lines are read: the whole file
    takes milliseconds on a large host."""
    with suppress(OSError), open("/proc/cpuinfo", "rb") as cpuinfo:  # as bytes: Python would import a codec for it
        for line in cpuinfo:
            if line.startswith(b"flags"):
                return set(line.decode().partition(":")[2].split())
    return set()

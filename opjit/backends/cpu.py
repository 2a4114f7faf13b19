"""The CPU: plain C, compiled for an x86-64 level, so that different machines can share a cache."""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

from opjit.backends import DeviceCompiler, Flags, Stream

# The x86-64 psABI levels, best first, with the /proc/cpuinfo flags that each adds. Not -march=native: a compiler takes a CPU's
# instructions from its family, and a virtual machine may not allow all of them.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"},
}
_AARCH64 = "aarch64"
# The fields of /proc/cpuinfo that tell CPU models apart.
_MAKE = {"vendor_id", "cpu family", "model", "cache size", "flags",
         "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"}

NEEDED = frozenset({"libtorch_cpu.so", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"})

# Mistakes that C compilers accept and that would show as a failed load or a crash.
STRICT = ("-Werror=implicit-function-declaration", "-Werror=implicit-int", "-Werror=int-conversion",
          "-Werror=incompatible-pointer-types", "-Werror=return-type", "-Werror=unused-result")
# Keep this machine's folders out of the binary: __FILE__ becomes the plain file name.
# The last matching map wins: an op's folder may lie inside the include folder.
PREFIX_MAPS = ("-ffile-prefix-map={staging}/=", "-ffile-prefix-map={include}/=", "-ffile-prefix-map={folder}/=")
# Lists every file that the compiler reads, system headers included, for the check after the build; torch's rule keeps no list.
DEPENDENCIES = "-Wp,-MD,{unique}.deps"
# For all glue code. torch's exceptions pass through it, hence -fexceptions; torch calls only its exported functions.
GLUE = ("-pipe", "-fexceptions", "-fvisibility=hidden", "-fno-plt", *STRICT, *PREFIX_MAPS, DEPENDENCIES)


class Cpu:
    name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    suffix = ".c"
    kernels: Path | None = None
    stream: Stream | None = None
    compiler: DeviceCompiler | None = None
    uses_nvcc = False

    def available(self) -> str | None:
        return None if platform.machine() in ("x86_64", "aarch64") else (
            f"opjit supports x86-64 and aarch64, and this machine is {platform.machine()}")

    def host_arch(self) -> str:
        return _host_arch()

    def archs(self) -> list[str]:
        return [*_LEVELS, _AARCH64]

    def takes(self, arch: str) -> bool:
        return arch in self.archs()

    def runs(self, arch: str) -> bool:
        """Each x86-64 level includes all lower ones."""
        known = list(_LEVELS)
        host = self.host_arch()
        return arch == host or (arch in known and host in known and known.index(arch) >= known.index(host))

    def runtime(self, cuda_version: str | None) -> str:
        return ""

    def flags(self, arch: str, runtime: str) -> Flags:
        march = "armv8-a" if arch == _AARCH64 else arch
        # errno and floating-point exceptions would keep gcc from vectorising plain loops; no op reports them
        c = ("-x", "c", "-std=gnu11", "-O3", f"-march={march}", "-fno-math-errno", "-fno-trapping-math", *GLUE)
        return Flags(c, (), ("-lm",), ("libtorch_cpu",), NEEDED)


@cache
def _host_arch() -> str:
    if platform.machine() == _AARCH64:
        return _AARCH64
    flags = _cpu_flags()
    best = "x86-64-v2"
    for level in reversed(_LEVELS):
        if not _LEVELS[level] <= flags:
            break
        best = level
    return best


def identity() -> str:
    """SHA-256 of the CPUs' model, caches and flags, which decide what -march=native means."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as cpuinfo:
        lines = [line for line in iter(cpuinfo.readline, "") if line.partition(":")[0].strip() in _MAKE]
    return hashlib.sha256("".join(sorted(set(lines))).encode()).hexdigest()


def _cpu_flags() -> set[str]:
    """The first CPU's flags; none in a chroot without /proc. Stops at the first CPU: the whole file takes milliseconds on a large host."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    return set()

"""The CPU: plain C, compiled for a level of x86-64 or ARM, so that different machines can share a cache."""

import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

from opjit import files
from opjit.backends import DeviceCompiler, Flags, Stream

# Each machine's levels, best first: the /proc/cpuinfo flags that a level adds, and its -march if
# that has another name. The levels of x86-64 come from the psABI, and neoverse-v2 is Grace.
# -march=native is not used because a compiler derives a CPU's instructions from its family, and a
# virtual machine may not allow all of them.
_FLAGS = {
    "x86_64": {
        "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
        "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe",
        "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    },
    "aarch64": {
        "neoverse-v2": "sve sve2 svebf16 svei8mm bf16 i8mm asimdfhm fcma jscvt lrcpc ilrcpc flagm flagm2 frint sb",
        "armv8.2-a+fp16+dotprod": "atomics asimdrdm crc32 fphp asimdhp asimddp",
        "armv8-a": "",
    },
}
_LEVELS = {
    machine: {level: set(flags.split()) for level, flags in levels.items()}
    for machine, levels in _FLAGS.items()
}
MACHINES = tuple(_LEVELS)
_MARCH = {"neoverse-v2": "armv9-a+bf16+i8mm"}  # gcc 12 does not support the CPU
# Functions of gcc that detect the CPU, and run code when a binary is opened.
_OF_MACHINE = {"aarch64": ("-mno-outline-atomics",)}
# The fields of /proc/cpuinfo that distinguish CPU models.
_MAKE = {
    "vendor_id",
    "cpu family",
    "model",
    "cache size",
    "flags",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "Features",
}

NEEDED = frozenset(
    {
        "libtorch_cpu.so",
        "libc.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
)

# Mistakes that C compilers accept and that would show as a failed load or a crash.
STRICT = (
    "-Werror=implicit-function-declaration",
    "-Werror=implicit-int",
    "-Werror=int-conversion",
    "-Werror=incompatible-pointer-types",
    "-Werror=return-type",
    "-Werror=unused-result",
)
# Keep this machine's folders out of the binary: __FILE__ becomes the plain file name. The last
# matching map wins: an op's folder may be inside the include folder.
PREFIX_MAPS = (
    "-ffile-prefix-map={staging}/=",
    "-ffile-prefix-map={include}/=",
    "-ffile-prefix-map={folder}/=",
)
# For all glue code. torch's exceptions pass through it, hence -fexceptions; torch calls only its exported functions.
GLUE = (
    "-pipe",
    "-fexceptions",
    "-fvisibility=hidden",
    "-fno-plt",
    *STRICT,
    *PREFIX_MAPS,
    "-ffunction-sections",  # the linker leaves out the functions and data that an op does not use
    "-fdata-sections",
)


def features(arch: str) -> set[str]:
    """Return the features in /proc/cpuinfo that a CPU needs for an arch: each level includes all lower ones."""
    levels = _LEVELS[machine_of(arch) or ""]
    lower = list(levels)[list(levels).index(arch) :]
    return set().union(*(levels[level] for level in lower))


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
        machine = platform.machine()
        return (
            None
            if machine in _LEVELS
            else f"opjit supports {' and '.join(_LEVELS)}, and this machine is {machine}"
        )

    def host_arch(self) -> str:
        return _host_arch()

    def archs(self) -> list[str]:
        return [level for levels in _LEVELS.values() for level in levels]

    def takes(self, arch: str) -> bool:
        return arch in self.archs()

    def runs(self, arch: str) -> bool:
        """Return whether `arch` is at most the host's: each level includes all lower ones."""
        levels = list(_LEVELS.get(platform.machine(), ()))
        host = self.host_arch()
        return arch == host or (arch in levels and levels.index(arch) >= levels.index(host))

    def runtime(self, cuda_version: str | None) -> str:
        return ""

    def flags(self, arch: str, runtime: str) -> Flags:
        # errno and floating-point exceptions would keep gcc from vectorizing plain loops; no op reports them
        c = (
            "-x",
            "c",
            "-std=gnu11",
            "-O3",
            f"-march={_MARCH.get(arch, arch)}",
            "-fno-math-errno",
            "-fno-trapping-math",
            *_OF_MACHINE.get(machine_of(arch) or "", ()),
            *GLUE,
        )
        return Flags(c, (), ("-lm",), ("libtorch_cpu",), NEEDED)


def machine_of(arch: str) -> str | None:
    """Return the machine of a CPU arch, ``"x86_64"`` or ``"aarch64"``; None for any other arch."""
    return next((machine for machine, levels in _LEVELS.items() if arch in levels), None)


@cache
def _host_arch() -> str:
    levels = _LEVELS[platform.machine()]
    flags = _cpu_flags()
    best = list(levels)[-1]
    for level in reversed(levels):
        if not levels[level] <= flags:
            break
        best = level
    return best


def identity() -> str:
    """Return the SHA-256 of the CPUs' model, caches and flags, which decide what -march=native means."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as cpuinfo:
        lines = [
            line for line in iter(cpuinfo.readline, "") if line.partition(":")[0].strip() in _MAKE
        ]
    return files.sha256("".join(sorted(set(lines))))


def _cpu_flags() -> set[str]:
    """Return the first CPU's flags; none in a chroot without /proc. Reading the whole file costs milliseconds on a large machine."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
        for line in cpuinfo:
            if line.startswith(("flags", "Features")):
                return set(line.partition(":")[2].split())
    return set()

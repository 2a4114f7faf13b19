"""The architecture to build for if a compiler does not support a GPU's architecture: the newest
supported one that the GPU can run.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from opjit import files
from opjit.backends.targets import Target
from opjit.errors import UnknownArch
from opjit.recipe import compilers, toolchain

# Every CUDA 12 and later compiles for these, so that the usual request does not need to query a compiler.
_ALWAYS_KNOWN = frozenset({"sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90"})
_PLAIN = r"sm_(\d+)(\d)"  # major and minor version; without the suffix of sm_90a


def served(target: Target, notes: Path | None) -> Target:
    """Return a target that the installed CUDA compilers support and that runs on the same GPUs.

    For example, with CUDA 13.0 the target ``sm_107`` becomes ``sm_103``. The target stays
    if it is supported, if no older architecture serves it, or if there is no compiler.
    """
    if not target.backend.uses_nvcc:
        return target
    parts = target.arch.split("+")
    if _ALWAYS_KNOWN.issuperset(parts):
        return target
    known = _compilable(target.runtime, notes)
    replaced = dict.fromkeys(_newest_serving(part, known) for part in parts)
    return target._replace(arch="+".join(replaced))


def require_supported(target: Target, notes: Path | None) -> Target:
    """Return a target that a user named. Raises UnknownArch if an installed CUDA compiler does not support it."""
    parts = target.arch.split("+")
    if target.backend.uses_nvcc and not _ALWAYS_KNOWN.issuperset(parts):
        require_known(parts, _compilable(target.runtime, notes))
    return target


def require_known(archs: Sequence[str], known: Collection[str]) -> None:
    """Raise UnknownArch if compilers lack one of the architectures that a user named. `known` is empty without a compiler."""
    if not known or all(arch.rstrip("af") in known for arch in archs):
        return
    instead = dict.fromkeys(_newest_serving(arch, known) for arch in archs)
    advice = f"use {', '.join(sorted(sorted(known), key=len))}"
    if {*instead} <= {*known}:
        advice = f"build for {'+'.join(instead)}, which runs on the same GPUs"
    raise UnknownArch(f"no installed CUDA compiler supports {'+'.join(archs)}; {advice}")


def _newest_serving(arch: str, known: Collection[str]) -> str:
    wanted = re.fullmatch(_PLAIN, arch)
    if arch in known or wanted is None:
        return arch
    major, minor = wanted.groups()
    serving = [
        each for each in (f"sm_{major}{older}" for older in range(int(minor))) if each in known
    ]
    return serving[-1] if serving else arch


def _compilable(runtime: str, notes: Path | None) -> set[str]:
    """Return the architectures that each installed CUDA compiler supports."""
    nvcc = toolchain.nvcc_of(runtime, notes)
    nvrtc = toolchain.find_nvrtc(runtime, notes)
    supported = []
    if nvcc is not None:
        supported.append(set(nvcc.archs.split()))
    if nvrtc is not None:
        supported.append(supported_by(nvrtc, notes))
    return set.intersection(*supported) if supported else set()


def supported_by(nvrtc: compilers.Nvrtc, notes: Path | None) -> set[str]:
    """Return NVRTC's architectures. A note keeps them, because loading the library costs time."""
    stamp = files.sha256(f"{nvrtc.library} {nvrtc.version}")[:16]
    note = notes and notes / f"nvrtc-archs-{stamp}"
    kept = files.read_checked(note)
    if isinstance(kept, list):
        return set(kept)

    import ctypes  # late: 2 ms, which no hit needs

    library = ctypes.CDLL(nvrtc.library)
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(numbers)
    found = [f"sm_{number}" for number in numbers]
    files.write_checked(note, found)
    return set(found)

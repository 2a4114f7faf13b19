"""The text of a .cu file as nvcc would see it, for the host and for each arch, from the C++ compiler's preprocessor."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opjit import resources
from opjit.builder.preprocessed import flatten, run_preprocessor
from opjit.recipe.compilers import Compiler, Nvrtc

HOST = ""  # in the place of an arch


# A request to the preprocessor.
TEXT = ("-w", "-x", "c++", "-E", "-dD", "-dI", "-o", "text.ii")


FIRST = resources.folder("kernels_c") / "nvrtc/preprocess.h"  # the text that it reads first


class CudaFile(NamedTuple):
    """A .cu file to compile."""

    source: str  # its path
    host: Sequence[str]  # flags of the C++ compiler, without folders of headers
    users: Sequence[str]  # the author's folders of headers
    folders: Sequence[str]  # the C++ compiler's flags for all folders of headers but CUDA's
    device: Sequence[str]  # flags of NVRTC, without the flags that define the author's macros
    nvcc: Collection[str]  # flags of nvcc, of which some define macros
    archs: Sequence[str]  # such as ["sm_80", "sm_90"]; "compute_90" is PTX
    shown: Callable[[str], str]  # from a file's path to its name in the device's part
    headers: Mapping[str, str]  # texts for NVRTC by the names in #include lines
    first: str = ""  # code that the host reads before it pretends to be nvcc
    theirs: tuple[
        str, ...
    ] = ()  # prefixes of paths that do not belong to the author, in addition to CUDA's
    preprocess: Callable[[Sequence[str], Path], str] | None = (
        None  # given flags with the macros of nvcc, and a folder for files; None: the C++ compiler alone does it
    )
    adapt: Callable[[CudaFile, str], CudaFile] | None = None  # to the text of the host's pass


def nvcc_macros(arch: str, archs: Iterable[str], release: str, flags: Collection[str]) -> list[str]:
    """Return the flags that define the macros of an nvcc release for the preprocessor, for an arch
    or, with `HOST`, for the host's part.

    `flags` are nvcc's. tests/builder/test_preprocessed.py compares them with the macros of nvcc.
    """
    major, minor, build = [*release.split("."), "0", "0"][:3]
    numbers = sorted({int(re.sub(r"\D", "", each)) * 10 for each in archs})
    macros = {
        "__CUDA_ARCH_LIST__": ",".join(map(str, numbers)),
        "__CUDACC_VER_MAJOR__": major,
        "__CUDACC_VER_MINOR__": minor,
        "__CUDACC_VER_BUILD__": build,
        "__CUDA_API_VER_MAJOR__": major,
        "__CUDA_API_VER_MINOR__": minor,
        "__NVCC_DIAG_PRAGMA_SUPPORT__": "1",
    }
    if int(major) >= 13:
        macros["__CUDACC_DEVICE_ATOMIC_BUILTINS__"] = "1"
    if arch:
        macros |= _arch_macros(arch)
    for flag, macro in _BY_FLAG.items():
        if flag in flags:
            macros[macro] = "1"
    return [f"-D{name}={value}" for name, value in macros.items()]


_BY_FLAG = {
    "-G": "__CUDACC_DEBUG__",
    "--device-debug": "__CUDACC_DEBUG__",
    "--expt-relaxed-constexpr": "__CUDACC_RELAXED_CONSTEXPR__",
    "-expt-relaxed-constexpr": "__CUDACC_RELAXED_CONSTEXPR__",
    "--expt-extended-lambda": "__CUDACC_EXTENDED_LAMBDA__",
    "--extended-lambda": "__CUDACC_EXTENDED_LAMBDA__",
}


def _arch_macros(arch: str) -> dict[str, str]:
    """Return the macros of code for an arch, such as ``sm_90a``."""
    number = int(re.sub(r"\D", "", arch)) * 10
    macros = {"__CUDA_ARCH__": str(number), "CUDA_DOUBLE_MATH_FUNCTIONS": "1"}
    if arch[-1] == "a":
        macros[f"__CUDA_ARCH_FEAT_SM{number // 10}_ALL"] = "1"
        macros["__CUDA_ARCH_SPECIFIC__"] = str(number)
    if arch[-1] in "af":
        macros["__CUDA_ARCH_FAMILY_SPECIFIC__"] = str(number)
    return macros


def flat_text(
    unit: CudaFile, arch: str, work: Path, compiler: Compiler, found: Nvrtc, release: str
) -> str:
    """Return the author's text as nvcc of a release would see it for an arch, or for the host."""
    scratch = work / f"text_{arch or 'host'}"
    scratch.mkdir(parents=True)
    told = nvcc_macros(arch, unit.archs, release, unit.nvcc)
    of_cuda = found.headers.split(":")
    if unit.preprocess:
        output = unit.preprocess(told, scratch)
    else:
        lacking = scratch / "lacking"
        flags = [*unit.host, *told, *unit.folders, *folders_of_cuda(found.headers)]
        command = [compiler.path, *flags, "-include", str(FIRST), "-idirafter", str(lacking)]
        run_preprocessor([*command, *TEXT, unit.source], scratch, lacking, tuple(of_cuda))
        output = (scratch / "text.ii").read_text("utf-8", "surrogateescape")
    own = str(resources.folder("kernels_c") / "nvrtc")
    theirs = (*of_cuda, own, str(scratch), *unit.theirs)
    users = tuple(f"{os.path.abspath(folder)}{os.sep}" for folder in unit.users)
    return flatten(output, theirs, users, unit.shown if arch else str, defined_macros(unit.host))


def folders_of_cuda(headers: str) -> list[str]:
    """Return the C++ compiler's flags for the headers of CUDA's runtime.

    A text with colons names their folders.
    """
    own = resources.folder("kernels_c") / "nvrtc"
    system = [word for folder in headers.split(":") for word in ("-isystem", folder)]
    return [f"-I{own}", *system, "-idirafter", f"{own}/absent"]


def defined_macros(flags: Iterable[str]) -> dict[str, str]:
    """Return the macros that flags define: by name, the text behind ``#define``."""
    macros = dict[str, str]()
    for flag in flags:
        if flag.startswith("-D"):
            head, equals, body = flag[2:].partition("=")
            macros[re.split(r"\(", head)[0]] = f"{head} {body if equals else '1'}"
        elif flag.startswith("-U"):
            macros.pop(flag[2:], None)
    return macros

"""Compiles an extension's .cu files with light headers, each in 2 s instead of nvcc's 6 s (tests/benchmarks/dropin.py --cuda).

The C++ compiler compiles the host code, and NVRTC compiles the kernels, as for an op (opjit/builder/cuda.py). nvcc compiles the files that
only nvcc supports.

    work/cuda/a.cuda.o/    the split of a.cu
    work/a.cuda.o          replaces nvcc's object file
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from opjit.builder.compile_step import run_tool
from opjit.builder.cuda import compile_unit
from opjit.builder.cuda_text import FIRST, HOST, CudaFile, folders_of_cuda, nvcc_macros
from opjit.builder.torch_builder import CompiledSource
from opjit.cpp_extension.light import Prepared, macros, streams
from opjit.cpp_extension.light import headers as light
from opjit.recipe import nvcc_flags, toolchain
from opjit.recipe.compilers import Nvcc, Nvrtc
from opjit.recipe.nvcc_flags import NvccOnly

_NVCCS = """
    NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS PYTORCH_NVCC CPATH CPLUS_INCLUDE_PATH C_INCLUDE_PATH
"""
_ARCH = r"(?:--gpu-architecture|-arch)=(sm_\w+)|-gencode=arch=compute_(\w+),code=(sm|compute)_(\2)"
_FOLDER = r"^(-I|-isystem|--[a-z-]+)=?"
_FILE = re.compile(r'^#line \d+ "(.+)"$', re.MULTILINE)  # in a flat text
_NO_CODE = re.compile(r"^#(?:line|define|undef) .*", re.MULTILINE)  # in a flat text
_IGNORED = r"--(expt-)?extended-lambda|-Xptxas=(-v|--verbose)|--ptxas-options=(-v|--verbose)"
_HALVES = re.compile(
    r"[Hh]alf|HALF|[Bb]float16|BFLOAT|Float16|_AND2?\b|opmath|acc_type|DISPATCH_V2|AT_DISPATCH_SWITCH"
)
_ACCESSORS = re.compile(r"Accessor|PtrTraits")
_NVCCS_ALONE = {
    re.compile(r"__global__[^;{]*\([^;{]*&[^;{]*\{"): "a kernel has a reference as a parameter",
    re.compile(
        r"\b(?:__device__|__constant__)\s+[\w:<>\s*]+\(\s*[\d.\"-]"
    ): "a device variable has parentheses",
    re.compile(
        r"\bcudaGetSymbolSize\b|\bcudaMemcpyFromSymbolAsync\b|\btexture\s*<"
    ): "it reads a symbol in a way that only nvcc supports",
}
# torch's headers that kernels need unchanged.
_AS_THEY_ARE = {
    "ATen/core/TensorAccessor.h",
    "c10/macros/Macros.h",
    "c10/macros/Export.h",
    "c10/util/Half.h",
    "c10/util/BFloat16.h",
}
# Headers that kernels do not need, and that these include.
_EMPTY_NAMES = """
    limits type_traits algorithm numeric utility tuple array initializer_list ostream
    iosfwd cstring iterator bit atomic optional cuda_runtime.h deque queue unordered_set
    variant bitset exception
    c10/util/ArrayRef.h c10/util/Exception.h c10/util/irange.h c10/util/complex.h
    c10/util/TypeSafeSignMath.h torch/headeronly/util/Exception.h torch/headeronly/util/HeaderOnlyArrayRef.h
"""
_EMPTY = tuple(_EMPTY_NAMES.split())
# cublas_v2.h, which torch's CUDA context includes, includes these. For nvcc, they call functions that only nvcc declares.
_OF_LIBRARIES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
# torch's headers add CUDA's conversions for nvcc, but with nvcc's macros complex.h includes thrust, which costs a second.
_FOR_KERNELS = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define __CUDACC__ 1
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <torch/headeronly/core/TensorAccessor.h>
#undef __CUDACC__
namespace at { using torch::headeronly::RestrictPtrTraits; }
namespace torch { using at::RestrictPtrTraits; }
"""


def compile_file(
    compilation: CompiledSource,
    flags: Sequence[str],
    prepared: Prepared,
    nvrtc: Nvrtc,
) -> None:
    """Compile a .cu file to the object file of a compilation, with torch's flags for nvcc.

    Raises NvccOnly if only nvcc supports the file or a flag, CompilerFailed, or OSError if the disk is full.
    """
    work = prepared.work
    folder = work / "cuda" / compilation.out
    folder.mkdir(parents=True)
    own = [flag for flag in _joined(flags) if not _is_of_another_release(flag, nvrtc)]
    unit = _unit(compilation.source, own, folder, prepared, nvrtc)
    compile_unit(unit, folder, prepared.cxx, nvrtc)
    both = ["opjit_host.o", "-x", "c", "opjit_fatbin.c", "-o", str(work / compilation.out)]
    run_tool([prepared.cxx.path, "-r", "-nostdlib", "-O1", "-fPIC", *both], folder)


def _joined(flags: Sequence[str]) -> list[str]:
    """Return flags for nvcc, each in one word."""
    found = [name for name in _NVCCS.split() if os.environ.get(name)]
    if found:
        raise NvccOnly(f"{found[0]} is set")
    return [*nvcc_flags.joined(flags)]


def _is_of_another_release(flag: str, nvrtc: Nvrtc) -> bool:
    """Return whether a flag names a folder of CUDA's headers, such as the Toolkit's, that NVRTC would refuse."""
    release = toolchain.cuda_release(re.sub(_FOLDER, "", flag))
    return bool(release) and not nvrtc.version.startswith(f"{release} ")


def _unit(
    source: str,
    flags: Sequence[str],
    folder: Path,
    prepared: Prepared,
    nvrtc: Nvrtc,
) -> CudaFile:
    """The file. `_adapted` adds everything that depends on its text."""
    include, host, device, archs = _sorted(flags)
    device, more = nvcc_flags.translated(device)

    host = [*host, *more, f"-ffile-prefix-map={folder.parents[1]}/="]

    def preprocess(told: Sequence[str], scratch: Path) -> str:
        given = [*host, *include]
        preprocessor = _preprocessor(prepared, nvrtc, source, given, told, scratch)
        return preprocessor.text_with_torchs(["-dI"])

    def adapt(unit: CudaFile, text: str) -> CudaFile:
        prepared.write(folder.name, _FILE.findall(text), text)
        if streams.COUNTS.search(prepared.programs[folder.name].code):
            raise NvccOnly("it names __COUNTER__, and headers count on")
        adapted = _adapted(unit, text)
        # The core has torch's headers of numbers, which _FOR_KERNELS must read first.
        first = prepared.write_first(host, folder.name, lambda _: _FOR_KERNELS not in adapted.first)
        return adapted._replace(host=[*host, *first[:2]])

    own = ["--pre-include=opjit_device.h", f"--include-path={light.OWN}"]
    device = ["-w", *device, *own, f"--include-path={light.INCLUDE}"]
    return CudaFile(
        source,
        host,
        prepared.users,
        [f"-I{prepared.folder_of(folder.name)}", *include],
        device,
        flags,
        archs,
        lambda path: Path(path).name,
        {},
        theirs=prepared.theirs,
        preprocess=preprocess,
        adapt=adapt,
    )


def _preprocessor(
    prepared: Prepared,
    cuda: Nvcc | Nvrtc,
    source: str,
    flags: Sequence[str],
    told: Sequence[str],
    scratch: Path,
) -> streams.Preprocessor:
    """Return the preprocessor that sees a .cu file as nvcc does, with the headers of a compiler. `told` are flags that describe nvcc."""
    if isinstance(cuda, Nvrtc):
        headers = cuda.headers
        version = cuda.version
    else:
        headers = f"{cuda.root}/include:{cuda.root}/include/cccl"
        version = cuda.build
    later = [*told, *folders_of_cuda(headers)]
    first = FIRST.read_text()
    around = macros.Surroundings(f'#include "{FIRST}"\n', tuple(later), (version, first))
    given = ["-x", "c++", *flags, *later, "-include", str(FIRST)]
    theirs = (*headers.split(":"), str(FIRST.parent))
    return prepared.preprocessor(source, given, scratch, scratch, around, theirs)


def check_for_nvcc(
    prepared: Prepared, nvcc: Nvcc, compilation: CompiledSource, words: Sequence[str], scratch: Path
) -> None:
    """Write the light headers of a .cu file that nvcc compiles with the flags `words`, and compare its tokens.

    Raises streams.Different if the file has other tokens with torch's headers.

    `scratch` is a directory for files. Raises NvccOnly for an unknown flag, and CompilerFailed.
    """
    flags = _joined(words)
    include, host, others, archs = _sorted(flags)
    _, more = nvcc_flags.translated(others)
    passes = []
    for arch in (HOST, *archs):
        told = nvcc_macros(arch, archs, nvcc.build.removeprefix("V"), flags)
        place = scratch / (arch or "host")
        place.mkdir(parents=True, exist_ok=True)
        given = [*host, *more, *include]
        passes.append(_preprocessor(prepared, nvcc, compilation.source, given, told, place))
    prepared.compare(passes, compilation.out)


def _adapted(unit: CudaFile, text: str) -> CudaFile:
    """Return a file with the headers that its text needs. Raises NvccOnly if only nvcc supports it."""
    code = _NO_CODE.sub("", text)
    for pattern, reason in _NVCCS_ALONE.items():
        if pattern.search(code):
            raise NvccOnly(reason)
    patterns = {"HALVES": _HALVES, "ACCESSORS": _ACCESSORS}
    needs = [f"-DOPJIT_{name}" for name, pattern in patterns.items() if pattern.search(code)]
    of_libraries = _OF_LIBRARIES if "ATen/cuda/" in code else ""
    first = _FOR_KERNELS if needs else of_libraries
    return unit._replace(
        device=[*unit.device, *needs],
        headers=_headers(code),
        first=f"{first}#include <torch/types.h>\n",
    )


def _sorted(flags: Sequence[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Sort nvcc's flags: directories of headers, flags for the host compiler, all other flags, and architectures."""
    include = []
    host = []
    others = []
    archs = list[str]()
    for flag in flags:
        arch = re.fullmatch(_ARCH, flag)
        part = nvcc_flags.part_of(flag)
        name, _, value = flag.partition("=")
        if arch:
            archs += (
                [arch[1], arch[1].replace("sm", "compute")] if arch[1] else [f"{arch[3]}_{arch[4]}"]
            )
        elif part == nvcc_flags.FOLDER:
            path = re.sub(_FOLDER, "", flag)
            include += [f"-I{path}"] if flag.startswith("-I") else ["-isystem", path]
        elif name == "-gencode":
            raise NvccOnly(f"NVRTC does not support the architectures in {flag}")
        elif name in ("-Xcompiler", "--compiler-options"):
            if "-ffile-prefix-map" in value:
                continue
            if re.search(
                r"[\\'\"]|^-[DUIi]|,-[DUIi]", value
            ):  # nvcc also passes these to its front end
                raise NvccOnly(f"{flag} has quotes, or words for the preprocessor")
            host += value.split(",")
        elif re.match(r"-[DU].*,", flag):
            raise NvccOnly(f"{flag} is a list")
        elif not re.fullmatch(_IGNORED, flag):
            others.append(flag)
    if not archs:
        raise NvccOnly("NVRTC supports no architecture in its flags")
    return include, host, others, list(dict.fromkeys(archs))


def _headers(code: str) -> Mapping[str, str]:
    """Return the text of each header that the device code includes, apart from headers that NVRTC finds. Most of torch's become empty."""
    named = [
        name
        for name in light.includes(code)
        if name.startswith(("torch/", "ATen/", "c10/", "pybind11/"))
    ]
    return {
        **dict.fromkeys({*_EMPTY, *named} - _AS_THEY_ARE, ""),
        "c10/util/Deprecated.h": "#pragma once\n#define C10_DEFINE_DEPRECATED_USING(name, type) using name = type;\n",
    }

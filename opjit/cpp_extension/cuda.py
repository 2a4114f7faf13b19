"""An extension's .cu files with light headers, each in 2 s and not nvcc's 6 s (tests/benchmarks/dropin.py --cuda): the C++ compiler takes
the host's part, NVRTC the kernels, as of an op (opjit/builder/cuda.py). What only nvcc takes is left to nvcc.

    work/cuda/a.cuda.o/    the split of a.cu
    work/a.cuda.o          in the place of nvcc's object file, so that torch's build file links it"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from opjit import processes
from opjit.builder import budget, torch_builder
from opjit.builder.compile_step import CompilerFailed, NvccOnly, run_tool
from opjit.builder.cuda import CudaFile, compile_unit, translated
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import headers as light
from opjit.recipe import headers, nvcc_flags
from opjit.recipe.toolchain import Compiler, Nvrtc

NEEDS = (budget.CXX_JOB, budget.NVCC_JOB)  # of compilers, with light headers
_EDGE = re.compile(r"^build (?P<out>\S+): cuda_compile (?P<source>.+)\n", re.MULTILINE)
_OTHER = re.compile(r"^build (?P<out>\S+): compile ", re.MULTILINE)
_NVCCS = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "PYTORCH_NVCC",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "C_INCLUDE_PATH",
)
_ARCH = re.compile(
    r"(?:--gpu-architecture|-arch)=(sm_\w+)|-gencode=arch=compute_(\w+),code=(sm|compute)_(\2)"
)
_IGNORED = re.compile(
    r"--(expt-)?extended-lambda|-Xptxas=(-v|--verbose)|--ptxas-options=(-v|--verbose)"
)
_HALVES = re.compile(
    r"[Hh]alf|HALF|[Bb]float16|BFLOAT|Float16|_AND2?\b|opmath|acc_type|DISPATCH_V2|AT_DISPATCH_SWITCH"
)
_SPACES = {
    "C10_HOST_DEVICE": {"__host__", "__device__"},
    "C10_DEVICE": {"__device__"},
    "C10_HOST": {"__host__"},
}
_ACCESSORS = re.compile(r"Accessor|PtrTraits")
_NVCCS_ALONE = {
    re.compile(
        r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b.*\b(?:__GNUC__|__clang__|__linux__|__unix__|__x86_64__|__aarch64__|__AVX|__SSE)",
        re.MULTILINE,
    ): "its preprocessor asks for the host's compiler",
    re.compile(
        r"^[ \t]*#[ \t]*define\b(?:[^\n\\]|\\.|\\\n)*__global__(?:[^\n\\]|\\.|\\\n)*\{",
        re.MULTILINE,
    ): "a macro makes kernels",
    re.compile(r"__global__[^;{]*\([^;{]*&[^;{]*\{"): "a kernel has a reference as a parameter",
    re.compile(
        r"\b(?:__device__|__constant__)\s+[\w:<>\s*]+\(\s*[\d.\"-]"
    ): "a device variable has parentheses",
    re.compile(
        r"\bcudaGetSymbolSize\b|\bcudaMemcpyFromSymbolAsync\b|\btexture\s*<"
    ): "it asks for a symbol in a way that only nvcc takes",
}
# Headers of torch's that kernels need as they are.
_AS_THEY_ARE = {
    "ATen/core/TensorAccessor.h",
    "c10/macros/Macros.h",
    "c10/macros/Export.h",
    "c10/util/Half.h",
    "c10/util/BFloat16.h",
}
_EMPTY = (
    "limits",
    "type_traits",
    "algorithm",
    "numeric",
    "utility",
    "tuple",
    "array",
    "initializer_list",
    "ostream",
    "iosfwd",
    "cstring",
    "iterator",
    "bit",
    "atomic",
    "optional",
    "cuda_runtime.h",
    "deque",
    "queue",
    "unordered_set",
    "variant",
    "bitset",
    "exception",
)
# What those include, and kernels do not need.
_WITHIN = (
    "c10/util/ArrayRef.h",
    "c10/util/Exception.h",
    "c10/util/irange.h",
    "c10/util/complex.h",
    "c10/util/TypeSafeSignMath.h",
    "torch/headeronly/util/Exception.h",
    "torch/headeronly/util/HeaderOnlyArrayRef.h",
)
# cublas_v2.h, which torch's CUDA context names, includes these; for nvcc they call functions that only nvcc declares.
_OF_LIBRARIES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
# torch's headers add CUDA's conversions for nvcc, but where complex.h is read for nvcc, it reads thrust, which takes a second.
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


@contextmanager
def compiled(
    extension: Extension, work: Path, cxx: Compiler, nvrtc: Nvrtc, ninja: str
) -> Iterator[None]:
    """A block for ninja's run, before which the .cu files that `work`/build.ninja gives to nvcc are compiled, beside the others. Raises
    NvccOnly if only nvcc takes a file or a flag, CompilerFailed, or OSError if the disk is full."""
    place = work / "build.ninja"
    written = place.read_text("utf-8", "surrogateescape")
    flags, edges = _flags(written), list(_EDGE.finditer(written))
    sources = {
        work / "cuda" / edge["out"]: re.sub(r"\$([$ :])", r"\1", edge["source"]) for edge in edges
    }
    others = [edge["out"] for edge in _OTHER.finditer(written)]
    with processes.pool(1 + budget.jobs(budget.CXX_JOB)) as pool:
        rest = (
            pool.submit(
                torch_builder.run_ninja,
                work,
                ninja,
                NEEDS,
                {**os.environ, "LC_ALL": "C"},
                False,
                others,
            )
            if others
            else None
        )
        try:
            list(
                pool.map(
                    lambda folder: _compile(extension, sources[folder], flags, folder, cxx, nvrtc),
                    sources,
                )
            )
        except CompilerFailed:
            _ = rest and rest.result()  # what a C++ file lacks, no nvcc brings
            raise
        with suppress(torch_builder.NinjaFailed):  # ninja runs again, and torch reports what fails
            _ = rest and rest.result()
    place.write_text(_EDGE.sub("", written), "utf-8", "surrogateescape")
    try:
        yield
    finally:
        place.write_text(written, "utf-8", "surrogateescape")  # people read torch's commands


def headers_read(work: Path) -> dict[str, set[str]]:
    """The files that the host's compiler read, by object file; those in `work` by the paths of the files that they are parts of."""
    found = dict[str, set[str]]()
    for listing in work.glob("cuda/*/opjit_host.deps"):
        split = f"{listing.parent}/host/files/"
        read = headers.read_dependencies(listing.read_text("utf-8", "surrogateescape"))
        full = {os.path.normpath(listing.parent / path) for path in read}
        own = {
            os.sep + path.removeprefix(split) if path.startswith(split) else path for path in full
        }
        found[listing.parent.name] = {
            path for path in own if not path.startswith(f"{work}{os.sep}")
        }
    return found


def _flags(text: str) -> list[str]:
    """The flags of torch's build file for nvcc, each in one word."""
    found = [name for name in _NVCCS if os.environ.get(name)]
    if found:
        raise NvccOnly(f"{found[0]} is set")
    lines = re.findall(r"^(?:cuda_cflags|cuda_post_cflags) = (.*)$", text, re.MULTILINE)
    return [*nvcc_flags.joined(shlex.split(re.sub(r"\$([$ :])", r"\1", " ".join(lines))))]


def _compile(
    extension: Extension,
    source: str,
    flags: Sequence[str],
    folder: Path,
    cxx: Compiler,
    nvrtc: Nvrtc,
) -> None:
    """Compile one file to the object that an edge of the build file names."""
    folder.mkdir(parents=True)
    compile_unit(_unit(extension, source, flags, folder), folder, cxx, nvrtc)
    for command in (
        [cxx.path, "-x", "c", "-O1", "-fPIC", "-c", "opjit_fatbin.c", "-o", "opjit_fatbin.o"],
        ["ld", "-r", "opjit_host.o", "opjit_fatbin.o", "-o", str(folder.parents[1] / folder.name)],
    ):
        run_tool(command, folder)


def _unit(extension: Extension, source: str, flags: Sequence[str], folder: Path) -> CudaFile:
    """The file and the author's headers, below `files` with their paths; torch's headers are not split."""
    paths = [source, *headers.closure([source], extension.include)]
    texts = {
        path: Path(path).read_text("utf-8", "surrogateescape") for path in dict.fromkeys(paths)
    }
    names = {path: f"files{os.path.abspath(path)}" for path in texts}
    include, host, device, archs = _sorted(flags)
    users = [os.path.dirname(names[source]), *(f"files{path}" for path in extension.include)]
    device, more = translated(device)
    code = light.code_of(texts.values())
    for pattern, reason in _NVCCS_ALONE.items():
        if pattern.search(code):
            raise NvccOnly(reason)
    needs = [
        f"-DOPJIT_{name}"
        for name, pattern in (("HALVES", _HALVES), ("ACCESSORS", _ACCESSORS))
        if pattern.search(code)
    ]
    torchs = Path(torch.__file__).parent / "include"
    return CudaFile(
        names[source],
        texts,
        names,
        [
            *host,
            *more,
            f"-ffile-prefix-map={folder.parents[1]}/=",
            *(f"-I{folder}/host/{place}" for place in users),
            *include,
        ],
        [
            "-w",
            *device,
            *needs,
            "--pre-include=opjit_device.h",
            *(f"--include-path={folder}/device/{place}" for place in users),
            f"--include-path={light.OWN}",
            f"--include-path={torchs}",
        ],
        archs,
        lambda path: Path(path).name,
        _headers(code),
        (_FOR_KERNELS if needs else _OF_LIBRARIES if "ATen/cuda/" in code else "")
        + "#include <torch/types.h>\n",
        _SPACES,
    )


def _sorted(flags: Sequence[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """nvcc's flags: folders of headers, flags for the host's compiler, others, and archs."""
    include, host, others, archs = list[str](), list[str](), list[str](), list[str]()
    for flag in flags:
        arch, part = _ARCH.fullmatch(flag), nvcc_flags.part_of(flag)
        name, _, value = flag.partition("=")
        if arch:
            archs += (
                [arch[1], arch[1].replace("sm", "compute")] if arch[1] else [f"{arch[3]}_{arch[4]}"]
            )
        elif part == nvcc_flags.FOLDER:
            path = re.sub(r"^(-I|-isystem|--[a-z-]+)=?", "", flag)
            include += [f"-I{path}"] if flag.startswith("-I") else ["-isystem", path]
        elif name == "-gencode":
            raise NvccOnly(f"{flag} names archs that NVRTC does not know")
        elif name in ("-Xcompiler", "--compiler-options"):
            if "-ffile-prefix-map" in value:
                continue
            if re.search(
                r"[\\'\"]|^-[DUIi]|,-[DUIi]", value
            ):  # nvcc passes these to its own front end, too
                raise NvccOnly(f"{flag} has quotes, or words for the preprocessor")
            host += value.split(",")
        elif re.match(r"-[DU].*,", flag):
            raise NvccOnly(f"{flag} is a list")
        elif not _IGNORED.fullmatch(flag):
            others.append(flag)
    if not archs:
        raise NvccOnly("its flags name no arch that NVRTC knows")
    return include, host, others, list(dict.fromkeys(archs))


def _headers(code: str) -> Mapping[str, str]:
    """What #include lines of the device's part bring, apart from headers that NVRTC finds: of torch's, next to nothing."""
    named = [
        name
        for name in light.includes(code)
        if name.startswith(("torch/", "ATen/", "c10/", "pybind11/"))
    ]
    return {
        **dict.fromkeys({*_EMPTY, *_WITHIN, *named} - _AS_THEY_ARE, ""),
        "c10/util/Deprecated.h": "#pragma once\n#define C10_DEFINE_DEPRECATED_USING(name, type) using name = type;\n",
    }

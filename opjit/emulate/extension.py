"""`opjit.load_inline` with CUDA sources on CPU tensors, under OPJIT_EMULATE=1.

The sources become C++, and tensors of the CPU are accepted in the place of tensors on a GPU. The result is an extension without CUDA."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from opjit.builder import runtime_objects
from opjit.builder.compile_step import NvccOnly
from opjit.cpp_extension.arguments import InlineCall
from opjit.cpp_extension.identity import EMULATED
from opjit.emulate import build
from opjit.emulate.translate import translate
from opjit.errors import NoKernel
from opjit.recipe import nvcc_flags

# Names of torch's C++ API for tensors on a GPU, and their twins.
_TWINS = r"""
\bis_cuda\b                                          is_cpu
\bkCUDA\b                                            kCPU
\b(Device(?:Type)?|DispatchKey|Backend)::CUDA\b      \1::CPU
(\bTORCH_LIBRARY_IMPL\s*\(\s*\w+\s*,\s*)CUDA\b       \1CPU
\.cuda\(\)                                           .cpu()
"""
_INCLUDE = re.compile(r'#[ \t]*include[ \t]*[<"]([\w./+-]+)[>"]')
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_OF_TORCH = re.compile(r"(ATen|c10)/cuda/\w+\.(h|cuh)")
# Findings need the names and lines of code. Debug information of torch's classes takes a compiler seconds.
_DEBUG = "-g1"


def emulated_call(call: InlineCall) -> InlineCall:
    """Return the call of an extension without CUDA that does the same as a call with CUDA sources.

    Raises NoKernel for a source that is not emulated.
    """
    flags = build.compiler_flags(build.set_checking())[1:]  # torch chooses the version of C++
    flags += [_DEBUG, EMULATED, f"-I{build.device_folder()}"]
    flags += nvcc_flags.translated(call.extra_cuda_cflags or [])[1]
    link = [f"-L{build.runtime_folder()}", f"-l:{build.RUNTIME}"]
    try:
        sources = _translated_sources(call)
    except NvccOnly as reason:
        raise NoKernel(f"{call.name} is not emulated: {reason}") from None
    return replace(
        call,
        cpp_sources=sources,
        cuda_sources=None,
        extra_cflags=[*flags, *(call.extra_cflags or [])],
        extra_cuda_cflags=None,
        extra_ldflags=[*(call.extra_ldflags or []), *link],
        with_cuda=False,
    )


def _translated_sources(call: InlineCall) -> list[str]:
    """Return C++ sources. CUDA code is in a file, so that findings have its name and the lines of the text.

    torch compiles both kinds of sources apart, so the macros of the first do not reach the second.
    """
    name = f"{call.name}.cu"
    cpp = _joined(call.cpp_sources)
    cuda = _joined(call.cuda_sources)
    translated = _translated(cuda, name)

    def make(staged: Path) -> None:
        (staged / name).write_text(translated, "utf-8", "surrogateescape")

    kept = runtime_objects.kept(build.base(), translated, (name,), make)
    ended = "".join(f"#undef {macro}\n" for macro in _MACRO.findall(cpp))
    included = f'#include "torch_cuda.h"\n{ended}#include "{kept / name}"\n'
    return [_translated(cpp, "cpp_sources"), included]


def _joined(sources: str | list[str] | None) -> str:
    return sources if isinstance(sources, str) else "\n".join(sources or [])


def _translated(text: str, name: str) -> str:
    """Translate a text, in which headers of CUDA and of torch's part for CUDA are the emulation's."""

    def header(found: re.Match[str]) -> str:
        own = build.HEADERS.get(found[1])
        if _OF_TORCH.fullmatch(found[1]):
            own = "torch_cuda.h"
        if own is not None:
            return f'#include "{own}"'
        missing = build.missing_feature(found[1])
        if missing:
            line = text.count("\n", 0, found.start()) + 1
            raise NvccOnly(f"{name}:{line}: {missing}")
        return found[0]

    for row in _TWINS.strip().splitlines():
        pattern, twin = row.split()
        text = re.sub(pattern, twin, text)
    _, _, lines = translate(_INCLUDE.sub(header, text), name).partition("\n")
    return lines

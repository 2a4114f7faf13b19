"""`opjit.load` and `opjit.load_inline` with CUDA sources on CPU tensors, under OPJIT_EMULATE=1.

The sources become C++, and tensors of the CPU are accepted in the place of tensors on a GPU. The result is an extension without CUDA."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opjit.builder import parts
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import CUDA, EMULATED
from opjit.emulate import build
from opjit.emulate.translate import TranslatedFiles
from opjit.errors import NoKernel
from opjit.recipe import nvcc_flags
from opjit.recipe.nvcc_flags import NvccOnly

# Names of torch's C++ API for tensors on a GPU, and their twins.
_TWINS = r"""
\bis_cuda\b                                          is_cpu
\bkCUDA\b                                            kCPU
\b(Device(?:Type)?|DispatchKey|Backend)::CUDA\b      \1::CPU
(\bTORCH_LIBRARY_IMPL\s*\(\s*\w+\s*,\s*)CUDA\b       \1CPU
\.cuda\(\)                                           .cpu()
"""
_FIRST = '#include <torch/extension.h>\n#include "torch_cuda.h"\n'


def emulated_call(call: LoadCall | InlineCall) -> LoadCall | InlineCall:
    """Return the call of an extension without CUDA that does the same as a call with CUDA sources, or the same call if it has none.

    Raises NoKernel for a source that is not emulated.
    """
    if not (
        call.cuda_sources
        if isinstance(call, InlineCall)
        else [path for path in _listed(call.sources) if path.endswith(CUDA)]
    ):
        return call
    link = [f"-L{build.runtime_folder()}", f"-l:{build.RUNTIME}"]
    program = TranslatedFiles(call.extra_include_paths or ())
    try:
        flags = [
            *build.compiler_flags(build.set_checking())[1:],  # torch chooses the version of C++
            # -g1: findings need names and lines; debug information of torch's classes takes a compiler seconds
            *("-g1", EMULATED),
            *nvcc_flags.translated(call.extra_cuda_cflags or [])[1],
            *(call.extra_cflags or []),
        ]
        if isinstance(call, LoadCall):
            sources, content = _of_load(call, program)
        else:
            sources, content = _of_inline(call, program)
    except NvccOnly as reason:
        raise NoKernel(f"{call.name} is not emulated: {reason}") from None
    build.warn_of_emulation()
    return replace(
        call,
        **sources,
        extra_cflags=[*flags, f"-DOPJIT_EMULATE_FILES={content}"],  # so its key covers all files
        extra_cuda_cflags=None,
        extra_ldflags=[*(call.extra_ldflags or []), *link],
        with_cuda=False,
    )


def _of_load(call: LoadCall, program: TranslatedFiles) -> tuple[dict[str, Any], str]:
    """Return the changed arguments of load, and the name of the folder with the translated files."""
    names = [program.add(Path(path)) for path in _listed(call.sources)]
    texts = _translated(program)
    units = []
    for name in names:
        if name.endswith(CUDA):
            texts[f"{name}.cpp"] = f'{_FIRST}#include "{name}"\n'
            name += ".cpp"
        units.append(name)
    folder = _written(texts)
    return {"sources": [str(folder / name) for name in units]}, folder.name


def _of_inline(call: InlineCall, program: TranslatedFiles) -> tuple[dict[str, Any], str]:
    """Return the changed arguments of load_inline, and the name of the folder. Findings have the name of a file, and the lines of the text.

    torch compiles both kinds of sources apart, so the macros of the first do not reach the second.
    """
    cpp = "\n".join(_listed(call.cpp_sources))
    name = f"{call.name}.cu"
    for key, text in (("cpp_sources", cpp), (name, "\n".join(_listed(call.cuda_sources)))):
        program.texts[key] = program.linked(text, key)
    texts = _translated(program)
    translated = texts.pop("cpp_sources")
    folder = _written(texts)
    ended = "".join(
        f"#undef {macro}\n" for macro in re.findall(r"(?m)^[ \t]*#[ \t]*define[ \t]+(\w+)", cpp)
    )
    included = f'#include "torch_cuda.h"\n{ended}#include "{folder / name}"\n'
    return {"cpp_sources": [translated, included], "cuda_sources": None}, folder.name


def _translated(program: TranslatedFiles) -> dict[str, str]:
    """Translate the files of a program, also names of torch. Raises NvccOnly for a feature that is not emulated."""
    if program.missing:
        raise NvccOnly(program.missing[0])
    texts = program.translated()
    for row in _TWINS.strip().splitlines():
        pattern, twin = row.split()
        texts = {name: re.sub(pattern, twin, text) for name, text in texts.items()}
    return texts


def _written(texts: Mapping[str, str]) -> Path:
    """Return a folder with translated files."""

    def make(staged: Path) -> None:
        for name, text in texts.items():
            (staged / name).write_text(text, "utf-8", "surrogateescape")

    return parts.kept(build.base(), parts.name_of(texts), [*texts], (), make)


def _listed(sources: str | list[str] | None) -> list[str]:
    return [sources] if isinstance(sources, str) else sources or []

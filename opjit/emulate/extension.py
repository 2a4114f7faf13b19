"""`opjit.load` and `opjit.load_inline` with CUDA sources on CPU tensors, under OPJIT_EMULATE=1.

The sources become C++, and tensors of the CPU are accepted in the place of tensors on a GPU. The result is an extension without CUDA."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opjit.builder import parts
from opjit.builder.compile_step import NvccOnly
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import CUDA, EMULATED
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
    flags = [
        *build.compiler_flags(build.set_checking())[1:],  # torch chooses the version of C++
        # -g1: findings need names and lines; debug information of torch's classes takes a compiler seconds
        *("-g1", EMULATED, f"-I{build.device_folder()}"),
        *nvcc_flags.translated(call.extra_cuda_cflags or [])[1],
        *(call.extra_cflags or []),
    ]
    link = [f"-L{build.runtime_folder()}", f"-l:{build.RUNTIME}"]
    files = _Files(call.extra_include_paths or ())
    try:
        sources = files.of_load(call) if isinstance(call, LoadCall) else files.of_inline(call)
    except NvccOnly as reason:
        raise NoKernel(f"{call.name} is not emulated: {reason}") from None
    build.warn_of_emulation()
    content = files.write().name  # the key of the extension covers all files by this word
    return replace(
        call,
        **sources,
        extra_cflags=[*flags, f"-DOPJIT_EMULATE_FILES={content}"],
        extra_cuda_cflags=None,
        extra_ldflags=[*(call.extra_ldflags or []), *link],
        with_cuda=False,
    )


class _Files:
    """The translated files of a program, in one folder: its sources, and the headers that they include from the program."""

    def __init__(self, include: Sequence[str]) -> None:
        self.include = include
        self.texts: dict[str, str] = {}  # by name in the folder
        self.names = dict[Path, str]()

    def of_load(self, call: LoadCall) -> dict[str, Any]:
        """Return the changed arguments of load."""
        names = []
        for path in _listed(call.sources):
            name = self._add(Path(path))
            if path.endswith(CUDA):
                self.texts[f"{name}.cpp"] = f'{_FIRST}#include "{name}"\n'
                name += ".cpp"
            names.append(name)
        folder = self.write()
        return {"sources": [str(folder / name) for name in names]}

    def of_inline(self, call: InlineCall) -> dict[str, Any]:
        """Return the changed arguments of load_inline. Findings have the name of a file, and the lines of the text.

        torch compiles both kinds of sources apart, so the macros of the first do not reach the second.
        """
        name = f"{call.name}.cu"
        cpp = "\n".join(_listed(call.cpp_sources))
        cuda = "\n".join(_listed(call.cuda_sources))
        self.texts[name] = self._translated(cuda, name, ())
        translated = self._translated(cpp, "cpp_sources", ())
        ended = "".join(
            f"#undef {macro}\n" for macro in re.findall(r"(?m)^[ \t]*#[ \t]*define[ \t]+(\w+)", cpp)
        )
        included = f'#include "torch_cuda.h"\n{ended}#include "{self.write() / name}"\n'
        return {"cpp_sources": [translated, included], "cuda_sources": None}

    def _add(self, path: Path) -> str:
        """Translate a file, unless it is translated, and return its name in the folder."""
        path = path.resolve()
        if path not in self.names:
            name = path.name
            if name in self.names.values():
                name = f"{len(self.names)}.{name}"
            self.names[path] = name
            text = path.read_text("utf-8", "surrogateescape")
            self.texts[name] = self._translated(text, path.name, (str(path.parent),))
        return self.names[path]

    def write(self) -> Path:
        def make(staged: Path) -> None:
            for name, text in self.texts.items():
                (staged / name).write_text(text, "utf-8", "surrogateescape")

        return parts.kept(build.base(), parts.name_of(self.texts), [*self.texts], (), make)

    def _translated(self, text: str, name: str, near: Sequence[str]) -> str:
        """Translate a text. Headers of CUDA and of torch's part for CUDA become the emulation's, and the program's are translated.

        `near` has the folder in which an #include looks first.
        """

        def header(found: re.Match[str]) -> str:
            wanted = found[1]
            if re.fullmatch(r"(ATen|c10)/cuda/\w+\.(h|cuh)", wanted):
                own = "torch_cuda.h"
            elif (build.device_folder() / "cuda" / wanted).is_file():
                own = f"cuda/{wanted}"
            else:
                missing = build.missing_feature(wanted)
                if missing:
                    line = text.count("\n", 0, found.start()) + 1
                    raise NvccOnly(f"{name}:{line}: {missing}")
                places = [Path(folder, wanted) for folder in (*near, *self.include)]
                local = next(filter(Path.is_file, places), None)
                if local is None:
                    return found[0]
                own = self._add(local)
            return f'#include "{own}"'

        shown = re.sub(r'#[ \t]*include[ \t]*[<"]([\w./+-]+)[>"]', header, text)
        for row in _TWINS.strip().splitlines():
            pattern, twin = row.split()
            shown = re.sub(pattern, twin, shown)
        return translate(shown, name).partition("\n")[2]


def _listed(sources: str | list[str] | None) -> list[str]:
    return [sources] if isinstance(sources, str) else sources or []

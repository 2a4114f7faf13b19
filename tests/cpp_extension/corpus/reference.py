"""The corpus built with torch's own headers. They take 20 s to parse, so a few files hold all programs, each in a namespace of its own.

    python -m tests.cpp_extension.corpus.reference FOLDER             # builds what is not there, and writes FOLDER/results.json
    python -m tests.cpp_extension.corpus.reference FOLDER cuda        # the CUDA programs, on a GPU
    python -m tests.cpp_extension.corpus.reference FOLDER cuda build  # only builds
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import filelock
import torch
from torch.utils import cpp_extension

from tests.cpp_extension.corpus.calls import CPU, CUDA
from tests.cpp_extension.corpus.outcomes import results
from tests.cpp_extension.corpus.program import CFLAGS, Program

INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
# A program's own module becomes a submodule. PYBIND11_MODULE may have options after the variable.
HEAD = """\
#include <torch/extension.h>
{includes}
#undef PYBIND11_MODULE
#define PYBIND11_MODULE(name, variable, ...) void corpus_bind(pybind11::module_ &variable)
"""


def merged(programs: Sequence[Program], entry: str) -> str:
    """One file with the programs, and a function `entry` that adds the module of each to another."""
    texts = [program.source for program in programs]
    spaces = [_in_namespace(one, text + "\n" + _binding(one), f"{one.name}.cpp") for one, text in zip(programs, texts, strict=True)]
    spaces += [f"namespace {one.identifier} {{ void corpus_bind(pybind11::module_ &); }}" for one in programs
               if one.functions is None and "PYBIND11_MODULE" in (one.cuda_source or "")]
    binds = [f'    {{ auto sub = m.def_submodule("{one.identifier}"); {one.identifier}::corpus_bind(sub); }}'
             for one in programs if one.library is None]
    return "\n".join([HEAD.format(includes=includes(texts)), *spaces, f"void {entry}(pybind11::module_ &m) {{", *binds, "}", ""])


def merged_cuda(programs: Sequence[Program]) -> str:
    """The same for the .cu files, to be compiled only."""
    texts = [program.cuda_source or "" for program in programs]
    implicit = "\n".join(f"#include <{name}>" for name in ("torch/types.h", "cuda.h", "cuda_runtime.h"))
    spaces = [_in_namespace(program, text, f"{program.name}.cu") for program, text in zip(programs, texts, strict=True)]
    return "\n".join([HEAD.format(includes=f"{implicit}\n{includes(texts)}"), *spaces])


def cuda_flags() -> list[str]:
    """nvcc's, for any torch: the headers of one without CUDA lack a file that its build writes."""
    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    macros = ["TORCH_EXTENSION_NAME=corpus", "TORCH_API_INCLUDE_EXTENSION_H", "C10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    return [*cpp_extension.COMMON_NVCC_FLAGS, "-std=c++20", "-w", "-arch=sm_80", "--compiler-options=-fPIC",
            *(f"-D{macro}" for macro in macros), *(f"-I{folder}" for folder in folders)]


def includes(texts: Iterable[str]) -> str:
    return "\n".join(dict.fromkeys(line.strip() for text in texts for line in INCLUDE.findall(text)))


def main_file(entries: Sequence[str]) -> str:
    declared = "".join(f"void {entry}(pybind11::module_ &);\n" for entry in entries)
    called = "".join(f"    {entry}(m);\n" for entry in entries)
    return f"#include <pybind11/pybind11.h>\n{declared}PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{\n{called}}}\n"


def _in_namespace(program: Program, text: str, file: str) -> str:
    undefined = "".join(f"#undef {name}\n" for name in dict.fromkeys(MACRO.findall(text)))
    return f'namespace {program.identifier} {{\n#line 1 "{file}"\n{INCLUDE.sub("", text)}\n}}\n{undefined}'


def _binding(program: Program) -> str:
    """What load_inline adds for its argument `functions`."""
    if program.functions is None:
        return ""
    shape = 'm.def("{0}", {0}, "{1}");' if program.plain else 'm.def("{0}", torch::wrap_pybind_function({0}), "{1}");'
    return "\n".join(["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *(shape.format(*item) for item in program.docs().items()), "}", ""])


def sources(programs: Sequence[Program], files: int = 2) -> dict[str, str]:
    """The files of the module with all programs, by name."""
    parts = {f"part{number}": programs[number::files] for number in range(files)}
    texts = {f"{name}.cpp": merged(some, f"bind_{name}") for name, some in parts.items()}
    of_cuda = {f"{name}_cuda.cu": merged_cuda(some) for name, some in parts.items() if some[0].cuda_source}
    return {**texts, **of_cuda, "main.cpp": main_file([f"bind_{name}" for name in parts])}


def build(folder: Path, programs: Sequence[Program]) -> ModuleType:
    """The module; ninja compiles what has changed."""
    texts = sources(programs, 7 if programs[0].cuda_source else 2)  # nvcc takes a minute for each
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    files = [str(folder / name) for name in texts]
    with filelock.FileLock(folder / "building"):
        (folder / "lock").unlink(missing_ok=True)  # of a build that was killed
        module = cpp_extension.load("corpus_reference", files, extra_cflags=CFLAGS, build_directory=str(folder))
    assert isinstance(module, ModuleType)
    return module


def part(module: ModuleType, program: Program) -> Any:
    return getattr(torch.ops, program.library) if program.library else getattr(module, program.identifier)


def main(folder: Path, device: str = "cpu", only: str = "") -> None:
    programs = CPU if device == "cpu" else CUDA
    module = build(folder, programs)
    if only == "build":
        return
    found = {program.name: results(part(module, program), program, device) for program in programs}
    (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

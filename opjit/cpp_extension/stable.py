"""Extensions for torch's stable ABI: one binary serves every torch from TORCH_TARGET_VERSION on, and every Python, so its key has the
version in place of both. The proof is the result: a binary that imports only functions that torch's headers declare for that version, from
sources that read no other headers of torch, none of Python, and nothing that says which torch builds it, runs with every later torch."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

import torch

from opjit.builder.compile_step import run_tool
from opjit.cpp_extension.identity import CUDA, Extension
from opjit.cpp_extension.light import headers, policy
from opjit.recipe import toolchain
from opjit.recipe.toolchain import Compiler

_MACRO = "TORCH_TARGET_VERSION"
_FIRST = re.compile(rb"(?:\s|//[^\n]*\n|/\*.*?\*/)*#[ \t]*define[ \t]+" + _MACRO.encode() + rb"[ \t]+([^\n]+)", re.DOTALL)
_VALUE = re.compile(r"0[xX]0*([1-9a-fA-F])([0-9a-fA-F]{2})0{12}[uUlL]*|\(\(\(0ULL \+ (\d+)\) << 56\) \| \(\(0ULL \+ (\d+)\) << 48\)\)")
_HEADERS = re.compile(r"torch/(?:csrc/stable/(?!pyobject)|headeronly/)|torch/csrc/inductor/aoti_torch/(?:c/(?:shim|macros|shim_deprecated)|"
                      r"generated/c_shim_aten)\.h$")
_DECLARING = "#include <torch/csrc/stable/c/shim.h>\n#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>\n"
# What is not the same with every torch and Python that may build it, or reads what no #include line names.
_DIFFERS = re.compile(rf"\bTORCH_(?:VERSION(?!_\d)|ABI_VERSION)\w*|\bPY_\w*VERSION\w*|__has_include|#[ \t]*undef[ \t]+{_MACRO}"
                      r"|#[ \t]*include(?:_next|[ \t]+[A-Za-z_]\w*)|^--?(?:include|imacros).*", re.MULTILINE)
_SYSTEMS = re.compile(r"@(?:GLIBC|GLIBCXX|CXXABI|GCC|GOMP|OMP|libcu\w+\.so)[_.\d]|^(?:__gmon_start__|_ITM_\w+)$")


def target(extension: Extension, implicit: bool) -> str:
    """Return the torch that all sources name first, such as ``"2.10"``; empty if not, if torch is older, or with torch/extension.h."""
    try:
        found = set() if implicit else {_named(extension, path) for path in (*extension.sources, *extension.texts)}
    except OSError:  # others say what is wrong
        return ""
    number = found.pop() if len(found) == 1 else None
    return f"{number[0]}.{number[1]}" if number and number <= tuple(map(int, torch.__version__.split(".")[:2])) else ""


def _named(extension: Extension, path: str) -> tuple[int, int] | None:
    """Return the version that a source is compiled for."""
    cuda = path.endswith(CUDA) or "cuda_sources" in path
    flags = [word.partition("=")[2] for word in extension.flags["cuda" if cuda else "c"] if _MACRO in word]
    if not flags:
        first = _FIRST.match(extension.texts.get(path) or Path(path).read_bytes())
        flags = [first[1].decode("utf-8", "replace")] if first else []
    value = _VALUE.fullmatch(flags[0].strip()) if len(flags) == 1 else None
    if value is None:
        return None
    return (int(value[1], 16), int(value[2], 16)) if value[1] else (int(value[3]), int(value[4]))


def refusal(extension: Extension, implicit: bool, library: Path, cxx: Compiler) -> str | None:
    """Return why a binary, in the folder of its build, is for this torch and Python alone. None: it serves every torch from then on."""
    program = policy.program_of(extension, implicit)
    asked = _DIFFERS.search("\n".join([program.code, *(word for words in extension.flags.values() for word in words)]))
    if asked:
        return f"it has {asked[0].strip()}"
    include = os.path.realpath(headers.INCLUDE)
    named = {name: os.path.realpath(f"{folder}/{name}") for name in program.includes
             for folder in (sysconfig.get_path("include"), headers.INCLUDE / headers.API, include) if os.path.exists(f"{folder}/{name}")}
    others = [name for name, path in named.items() if not _HEADERS.match(os.path.relpath(path, include))]
    if others:
        return f"it includes {others[0]}"
    source, (major, minor) = library.with_name("opjit_stable.h"), map(int, extension.stable.split("."))
    source.write_text(f"#define {_MACRO} 0x{major:02x}{minor:02x}000000000000\n#define USE_CUDA\n{_DECLARING}")
    command = [cxx.path, "-E", "-P", "-x", "c++", "-std=c++20", f"-I{include}", str(source)]
    declared = {*re.findall(r"\b((?:aoti_)?torch_\w+)\(", run_tool(command, library.parent))}
    imported = [line.split()[-1] for line in toolchain.run(["nm", "-D", "--undefined-only", str(library)]).stdout.splitlines()]
    beyond = [name for name in imported if name not in declared and not _SYSTEMS.search(name)]
    return f"it imports {beyond[0]}, which is no function of torch's stable ABI of {extension.stable}" if beyond else None

"""Extensions for torch's stable ABI.

One binary works with every torch from TORCH_TARGET_VERSION on, and with every Python, so its key has that version in place of both. opjit
proves this on the result. A binary runs with every later torch if it imports only functions that torch's headers declare for that version,
if its compilers read no other header of torch and no header of Python, and if its sources do not test which torch builds them. With
Py_LIMITED_API, the same holds for Python, its headers and its functions.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from opjit.cpp_extension.identity import CUDA, Extension, own_folders
from opjit.recipe import compilers, recorder
from opjit.recipe.compilers import Compiler

if TYPE_CHECKING:
    from opjit.builder.torch_builder import CompiledSource

_MACRO = "TORCH_TARGET_VERSION"
_PYTHON = "Py_LIMITED_API"
_FIRST = re.compile(
    rb"(?:\s|//[^\n]*\n|/\*.*?\*/)*#[ \t]*define[ \t]+" + _MACRO.encode() + rb"[ \t]+([^\n]+)",
    re.DOTALL,
)
_VALUE = r"0[xX]0*([1-9a-fA-F])([0-9a-fA-F]{2})0{12}[uUlL]*|\(\(\(0ULL \+ (\d+)\) << 56\) \| \(\(0ULL \+ (\d+)\) << 48\)\)"
_HEADERS = r"torch/(?:csrc/stable/(?!pyobject)|headeronly/|csrc/inductor/aoti_torch/(?:c/|generated/c_shim_aten\.h$))"
_DECLARING = "#include <torch/csrc/stable/c/shim.h>\n#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>\n"
_OF_PYTHON = "#if __has_include(<Python.h>)\n#include <Python.h>\n#endif\n"
# Words with a meaning that depends on the torch or the Python that builds the extension.
_DIFFERS = (
    r"\bTORCH_(?:VERSION(?!_\d)|ABI_VERSION)\w*|\bPY_\w*VERSION\w*|__has_include"
    rf"|#[ \t]*undef[ \t]+(?:{_MACRO}|{_PYTHON})"
)
_SYSTEMS = (
    r"@(?:GLIBC|GLIBCXX|CXXABI|GCC|GOMP|OMP|libcu\w+\.so)[_.\d]|^(?:__gmon_start__|_ITM_\w+)$"
)


def target(extension: Extension, implicit: bool) -> str:
    """Return the version of torch that all sources name first, such as ``"2.10"``.

    The result is empty if they don't, if they use torch/extension.h, or if this torch or Python is older.
    """
    limits = _limits(extension).values()
    if limits and (
        sysconfig.get_config_var("Py_GIL_DISABLED")
        or not all(3 <= limit <= sys.hexversion for limit in limits)
    ):
        return ""
    try:
        found = (
            set()
            if implicit
            else {_named(extension, path) for path in (*extension.sources, *extension.texts)}
        )
    except OSError:  # a later step reports it
        return ""
    number = found.pop() if len(found) == 1 else None
    return (
        f"{number[0]}.{number[1]}"
        if number and number <= tuple(map(int, torch.__version__.split(".")[:2]))
        else ""
    )


def _named(extension: Extension, path: str) -> tuple[int, int] | None:
    """Return the version that a source is compiled for."""
    cuda = path.endswith(CUDA) or "cuda_sources" in path
    flags = [
        word.partition("=")[2]
        for word in extension.flags["cuda" if cuda else "c"]
        if _MACRO in word
    ]
    if not flags:
        first = _FIRST.match(extension.texts.get(path) or Path(path).read_bytes())
        flags = [first[1].decode("utf-8", "replace")] if first else []
    value = re.fullmatch(_VALUE, flags[0].strip()) if len(flags) == 1 else None
    if value is None:
        return None
    return (int(value[1], 16), int(value[2], 16)) if value[1] else (int(value[3]), int(value[4]))


def _limits(extension: Extension) -> dict[str, int]:
    """Return the oldest Python that each language's flags name: 0x030A0000 is 3.10, 3 is any version, and 0 is a malformed number."""
    found = [
        (language, re.fullmatch(rf"(?:-D)?{_PYTHON}=(0[xX][0-9a-fA-F]+|3)", word))
        for language, words in extension.flags.items()
        for word in words
        if _PYTHON in word
    ]
    return {language: int(value[1], 0) if value else 0 for language, value in found}


def _opened(log: Path) -> list[str]:
    """Return the real paths of the files that the tools of a compilation opened, in order, apart from files that they made."""
    record = recorder.read([log])
    return [os.path.realpath(path) for path in record.opened if path not in record.written]


def _authors_code(cxx: Compiler, logs: Iterable[Path]) -> list[str]:
    """Return the texts, without comments, of the files that are neither torch's and Python's nor the compiler's."""
    from opjit.cpp_extension.light import headers  # late: no hit needs it

    others = (*own_folders(), *cxx.includes.split(":"), "/dev")
    prefixes = tuple(f"{os.path.realpath(folder)}/" for folder in others)
    paths = set().union(*map(_opened, logs))
    own = sorted(path for path in paths if not path.startswith(prefixes))
    return [headers.code_of([Path(path).read_text("utf-8", "replace")]) for path in own]


def refusal(
    extension: Extension, library: Path, cxx: Compiler, compilations: Iterable[CompiledSource]
) -> str | None:
    """Return why a binary works only with this torch and Python, or None if it works with every later torch.

    `library` is in the directory of its build, with the records of the compilers.
    """
    from opjit.builder.compile_step import run_tool
    from opjit.cpp_extension.light import headers

    work = library.parent
    logs = {work / f"{each.out}.{recorder.LOG}": each for each in compilations}
    if not all(log.is_file() for log in logs):
        return "a compiler cannot be watched"
    words = [word for each in extension.flags.values() for word in each]
    asked = re.search(_DIFFERS, "\n".join([*_authors_code(cxx, logs), *words]))
    if asked:
        return f"it has {asked[0]}"
    limits = _limits(extension)
    (major, minor) = map(int, extension.stable.split("."))
    include, python = (
        f"{os.path.realpath(folder)}/"
        for folder in (headers.INCLUDE, sysconfig.get_path("include"))
    )
    source = work / "opjit_stable.h"
    source.write_text(
        (f"#define {_PYTHON} {min(limits.values()):#x}\n{_OF_PYTHON}" if limits else "")
        + f"#define {_MACRO} 0x{major:02x}{minor:02x}000000000000\n#define USE_CUDA\n{_DECLARING}"
    )
    text = run_tool(
        [cxx.path, "-E", "-x", "c++", "-std=c++20", f"-I{include}", f"-I{python}", str(source)],
        work,
    )
    limited = {*map(os.path.realpath, re.findall(r'^# \d+ "(.+)"', text, re.MULTILINE))}
    for log, compilation in logs.items():
        language = "cuda" if compilation.by_nvcc else "c"
        for path in _opened(log):
            ours = True
            if path.startswith(include):
                ours = re.match(_HEADERS, path[len(include) :]) is not None
            elif path.startswith(python):
                ours = language in limits and path in limited
            if not ours:
                return f"it includes {path.removeprefix(python).removeprefix(include)}"
    declared = {*re.findall(r"\b(?:(?:aoti_)?torch_\w+(?=\()|_?Py\w+(?=[(;]))", text)}
    imported = [
        line.split()[-1]
        for line in compilers.run_compiler(
            ["nm", "-D", "--undefined-only", str(library)]
        ).stdout.splitlines()
    ]
    beyond = [name for name in imported if name not in declared and not re.search(_SYSTEMS, name)]
    return (
        f"it imports {beyond[0]}, which is no function of torch's stable ABI of {extension.stable}"
        if beyond
        else None
    )

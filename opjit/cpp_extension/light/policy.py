"""Which extensions may try light headers, and which of them opjit's binding binds to Python. Light headers refuse next to nothing: a name
that they lack is an error of the compiler, and streams.py compares what the preprocessor makes of a program."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import headers, table
from opjit.recipe import headers as included

BINDING = ("opjit_bind.h",)
BINDING_NEEDS = (
    "torch/csrc/utils/pybind.h",
    "torch/csrc/Exceptions.h",
    "torch/csrc/autograd/variable.h",
)  # opjit_bind.cpp
UNKNOWN_TYPE = "opjit's binding does not know"  # in the compiler's message about a type, which pybind11's own binding may know
_TORCHS = ("torch/", "ATen/", "c10/", "pybind11/")
_BOUND = "arg|module_?|call_guard|gil_scoped_release|gil_scoped_acquire|overload_cast"  # the names of pybind11 in opjit_bind.h
_BEYOND = re.compile(
    rf"\b(?:py|pybind11)\s*::\s*(?!(?:{_BOUND})\b)\w|\bPYBIND11_(?!MODULE\b)\w|\bnamespace\s+(?:py|pybind11)\b"
    r"|\b(?:noconvert|def_submodule|wrap_pybind_function_no_gil|add_object|reload|type_caster)\b"
    r"|\b(?:PY_\w+|Py_\w+|_Py\w+|THP\w+|Py(?!Torch\b|Init_)[A-Z]\w+)"
    r"|#[ \t]*include[ \t]*<(?:Python\.h|numpy/|pybind11/(?!pybind11\.h|stl\.h))"
)


class Program(NamedTuple):
    """An extension's text."""

    code: str  # of its sources and their headers, without comments
    includes: tuple[str, ...]  # the headers that it names
    flags: tuple[str, ...]  # those that define macros
    plain: bool  # no macro of its own changes the layout of the C++ library's classes


def macro(flag: str) -> str:
    """Return the word that a flag such as ``-DNAME=1`` defines."""
    return flag[2:].partition("=")[0]


def program_of(extension: Extension, implicit: bool) -> Program:
    """Return an extension's text.

    `implicit`: torch's builder adds torch/extension.h. Raises OSError if a file cannot be read."""
    files = authors_files(extension)
    contents = [Path(path).read_bytes() for path in files if not path.endswith((".a", ".o", ".so"))]
    texts = [
        content.decode("utf-8", "replace") for content in (*extension.texts.values(), *contents)
    ]
    code = headers.code_of(texts)
    first = ("torch/extension.h",) if implicit else ()
    flags = [word for language in ("c", "cuda") for word in extension.flags.get(language, ())]
    own = [word for word in flags if word.startswith(("-D", "-U"))]
    return Program(
        code,
        tuple(dict.fromkeys((*first, *headers.includes(code)))),
        tuple(dict.fromkeys(own)),
        not any("_GLIBCXX" in text for text in (code, *own)),
    )


def authors_files(extension: Extension) -> list[str]:
    """Return the files of an extension's author, as far as #include lines and macros show them: a guess, which the key does not rest on."""
    scan = included.Scan()
    scan.texts.update(extension.texts)
    words = [word for language in extension.flags.values() for word in language]
    roots = [*extension.sources, *extension.texts]
    found = included.closure(roots, extension.include, scan, words)
    return [path for path in found if path not in extension.texts]


def refusal(extension: Extension, implicit: bool) -> str | None:
    """Return why only torch/extension.h will do. None: light headers may do."""
    try:
        program = program_of(extension, implicit)
    except OSError as error:
        return f"{error.filename} cannot be read"
    return (
        None
        if any(name.startswith(_TORCHS) for name in program.includes)
        else "it includes none of torch's headers"
    )


def needs_pybind11(program: Program) -> bool:
    """Whether a program names more of pybind11 or Python than opjit's binding has."""
    return (
        not program.plain
        or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
        or _BEYOND.search(program.code) is not None
    )


def pybind11_headers(code: str) -> list[str]:
    """Return torch's headers for Python without those of torch::nn."""
    names = [
        "torch/csrc/python_headers.h",
        "torch/csrc/Device.h",
        "torch/csrc/Dtype.h",
        "torch/csrc/DynamicTypes.h",
        "torch/csrc/Exceptions.h",
        "torch/csrc/utils/pybind.h",
    ]
    return names + [header for header, pattern in table.PYTHON.items() if pattern.search(code)]

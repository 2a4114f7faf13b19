"""Finds the headers that a source's text needs, and whether opjit's binding can bind it to Python.

Light headers refuse almost no source, because the compiler reports a name that they lack, and streams.py compares the preprocessed text.
"""

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import headers, table

BINDING = ("opjit_bind.h",)
# opjit_bind.cpp.
BINDING_NEEDS = (
    "torch/csrc/utils/pybind.h",
    "torch/csrc/Exceptions.h",
)
UNKNOWN_TYPE = "opjit's binding does not know"  # in the compiler's message about a type, which pybind11's binding may support
_BOUND = "arg|module_?|call_guard|gil_scoped_release|gil_scoped_acquire|overload_cast"  # the names of pybind11 in opjit_bind.h
_BEYOND = (
    rf"\b(?:py|pybind11)\s*::\s*(?!(?:{_BOUND})\b)\w|\bPYBIND11_(?!MODULE\b)\w|\bnamespace\s+(?:py|pybind11)\b"
    r"|\b(?:noconvert|def_submodule|wrap_pybind_function_no_gil|add_object|reload|type_caster)\b"
    r"|\b(?:PY_\w+|Py_\w+|_Py\w+|THP\w+|Py(?!Torch\b|Init_)[A-Z]\w+)"
    r"|#[ \t]*include[ \t]*<(?:Python\.h|numpy/|pybind11/(?!pybind11\.h|stl\.h))"
)


class Program(NamedTuple):
    """The text of a source and of the author's headers that it includes."""

    files: frozenset[str]  # their paths
    code: str  # as the author wrote it, without comments
    includes: tuple[str, ...]  # the headers that it includes
    plain: bool  # it does not define a macro that changes the layout of the C++ library's classes

    @property
    def names_torch(self) -> bool:
        """Whether it includes a header of torch."""
        return any(headers.text_of(name) is not None for name in self.includes)


def macro_flags(extension: Extension) -> tuple[str, ...]:
    """Return the flags of an extension that define macros."""
    flags = [word for language in ("c", "cuda") for word in extension.flags.get(language, ())]
    return tuple(word for word in flags if word.startswith(("-D", "-U")))


def program_of(files: Iterable[str], flags: Iterable[str]) -> Program:
    """Return the text of a source, for which the preprocessor read the author's `files`."""
    paths = frozenset(files)
    code = headers.code_of(Path(path).read_text("utf-8", "replace") for path in sorted(paths))
    return Program(
        paths,
        code,
        tuple(headers.includes(code)),
        not any("_GLIBCXX" in text for text in (code, *flags)),
    )


def needs_pybind11(program: Program) -> bool:
    """Whether a program names more of pybind11 or Python than opjit's binding has."""
    return (
        not program.plain
        or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
        or re.search(_BEYOND, program.code) is not None
    )


def pybind11_headers(code: str) -> list[str]:
    """Return torch's headers for Python without the headers of torch::nn."""
    names = [
        "torch/csrc/python_headers.h",
        "torch/csrc/Device.h",
        "torch/csrc/Dtype.h",
        "torch/csrc/DynamicTypes.h",
        "torch/csrc/Exceptions.h",
        "torch/csrc/utils/pybind.h",
    ]
    return names + [header for header, pattern in table.PYTHON.items() if pattern.search(code)]

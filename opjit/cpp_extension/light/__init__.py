"""Light headers: torch's own classes and functions, as far as a program names them, in a tenth of the time of torch/extension.h.

A program that a compiler takes over light headers means the same over torch/extension.h, as both hold torch's own text; README.md says how
that is proved. The rest of opjit uses three things:

    VERSION                 enters the key of a binary
    policy.refusal()        why an extension is built over torch/extension.h at once; None: light headers may do
    prepare()               writes the headers, and returns what to compile and link with
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import binding, headers, macros, policy
from opjit.errors import BuildError
from opjit.recipe.toolchain import Compiler

VERSION = "1"  # increase it when light headers, or the split of CUDA files, make another binary of the same text; a test says when


class Prepared(NamedTuple):
    """What an extension is compiled and linked with.

    Attributes:
        folders: to search for headers before torch's.
        objects: to link with.
        note: for people, such as ``light headers with torch/library.h``.
    """

    folders: list[str]
    objects: list[str]
    note: str


def prepare(extension: Extension, implicit: bool, folder: Path, base: Path, cxx: Compiler) -> Prepared:
    """Write the headers for an extension.

    Args:
        implicit: whether torch's builder adds torch/extension.h.
        folder: to write to.
        base: folder of the store, which keeps the compiled part.

    Raises:
        BuildError: a macro means something else with torch/extension.h.
        OSError: a source cannot be read, or a folder is not writable.
    """
    program = policy.program_of(extension, implicit)
    common = binding.compiled(base, cxx)
    own = policy.needs_pybind11(program) or extension.pybind11 or common is None
    bound = policy.pybind11_headers(program.code) if own else policy.BINDING
    named = headers.write(program.code, program.includes, folder, bound, made_by_torch=common is None)
    named += ["pybind11"] if own else []
    beyond = [name for name in named if name.startswith(("torch/", "pybind11")) and name not in headers.SMALL]
    note = "light headers" + (f" with {', '.join(beyond)}" if beyond else "")
    folders = [str(folder), str(headers.OWN), str(headers.OWN.parent)]
    asked = policy.conditions(program)
    differing = macros.different(asked, folders, base, cxx) if asked else []
    if differing:
        raise BuildError(f"a condition of its preprocessor names {differing[0]}, which torch/extension.h may define as another macro",
                         op=extension.name, target=extension.purpose)
    return Prepared(folders, [str(common)] if common else [], note)

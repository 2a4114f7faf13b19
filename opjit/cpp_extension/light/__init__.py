"""Light headers: torch's own classes and functions, as far as a program names them, in a tenth of the time of torch/extension.h.

A program that a compiler takes over light headers means the same over torch/extension.h, as both hold torch's own text; README.md says how
that is proved. The rest of opjit uses these:

    VERSION                 enters the key of a binary
    policy.refusal()        why an extension is built over torch/extension.h at once; None: light headers may do
    prepare()               writes the headers, and returns what to compile and link with
    mistakes.is_final()     whether an error is the author's, so that torch/extension.h would not help
    MayLack                 is raised where it would
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import binding, headers, policy, vocabulary
from opjit.cpp_extension.light.mistakes import Attempt
from opjit.errors import BuildError, OpjitError
from opjit.recipe.toolchain import Compiler

INLINE = ("main.cpp", "cuda.cu")  # as torch names inline sources
VERSION = "1"  # increase it when light headers, or the split of CUDA files, make another binary of the same text; a test says when


class MayLack(Exception):
    """Light headers may lack what a program needs.

    Attributes:
        error: for the user, if there is no nvcc to compile it with torch/extension.h.
    """

    def __init__(self, error: OpjitError) -> None:
        super().__init__(str(error))
        self.error = error


class Prepared(NamedTuple):
    """What an extension is compiled and linked with.

    Attributes:
        attempt: the compilation; its `folders` are to be searched for headers before torch's.
        objects: to link with.
        note: for people, such as ``light headers with torch/library.h``.
    """

    attempt: Attempt
    objects: list[str]
    note: str


def prepare(extension: Extension, implicit: bool, work: Path, base: Path, cxx: Compiler) -> Prepared:
    """Write the headers for an extension.

    Args:
        implicit: whether torch's builder adds torch/extension.h.
        work: folder where it is compiled; they are written to its folder ``light``.
        base: folder of the store, which keeps the compiled part.

    Raises:
        MayLack: a macro means something else with torch/extension.h.
        OSError: a source cannot be read, or a folder is not writable.
    """
    program, folder = policy.program_of(extension, implicit), work / "light"
    common = binding.compiled(base, cxx)
    own = policy.needs_pybind11(program) or extension.pybind11 or common is None
    bound = policy.pybind11_headers(program.code) if own else policy.BINDING
    named = headers.write(program.code, program.includes, folder, bound, made_by_torch=common is None)
    named += ["pybind11"] if own else []
    beyond = [name for name in named if name.startswith(("torch/", "pybind11")) and name not in headers.SMALL]
    note = "light headers" + (f" with {', '.join(beyond)}" if beyond else "")
    folders = [str(folder), str(headers.OWN), str(headers.OWN.parent)]
    asked = policy.conditions(program)
    differing = vocabulary.different(asked, folders, base, cxx) if asked else []
    if differing:
        raise MayLack(BuildError(f"a condition of its preprocessor names {differing[0]}, which torch/extension.h may define as another "
                                 "macro", op=extension.name, target=extension.purpose))
    files = frozenset([*map(extension.place, extension.inputs), *(str(work / name) for name in INLINE)])
    return Prepared(Attempt(program, files, folders, base, cxx), [str(common)] if common else [], note)

"""Light headers: torch's own text, as far as a program names it, in a tenth of the time of torch/extension.h; README.md has the proof.
`policy` says which programs may try, `prepare` writes the headers, and `mistakes` says which errors are the author's."""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from opjit import files, progress
from opjit.builder import runtime_objects
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import headers, policy, vocabulary
from opjit.cpp_extension.light.policy import Program
from opjit.errors import BuildError, OpjitError
from opjit.recipe.toolchain import Compiler

INLINE = ("main.cpp", "cuda.cu")  # as torch names inline sources
VERSION = "3"  # increase it when light headers, or the split of CUDA files, make another binary of the same text; a test says when
_OBJECT = "opjit_bind.o"


class MayLack(Exception):
    """Light headers may lack what a program needs. `error` is for the user, if there is no nvcc to compile it with torch/extension.h."""

    def __init__(self, error: OpjitError) -> None:
        super().__init__(str(error))
        self.error = error


class Prepared(NamedTuple):
    """What an extension is compiled and linked with."""

    program: Program
    files: frozenset[str]  # the author's
    folders: list[str]  # those of light headers, to be searched before torch's
    base: Path  # folder of the store
    cxx: Compiler
    objects: list[str]  # to link with
    note: str  # for people, such as light headers with torch/library.h

    def contents(self) -> list[tuple[str, str]]:
        """The SHA-256 of each light header, by path."""
        return sorted(
            (str(path), files.digest(str(path)))
            for folder in self.folders
            for path in Path(folder).rglob("*.h")
        )


def prepare(
    extension: Extension, implicit: bool, work: Path, base: Path, cxx: Compiler
) -> Prepared:
    """Write the headers for an extension to the folder ``light`` in `work`, where it is compiled; `base` keeps the compiled part. Raises
    MayLack if a macro means something else with torch/extension.h, OSError if a source cannot be read or a folder is not writable."""
    program, folder = policy.program_of(extension, implicit), work / "light"
    common = compiled_binding(base, cxx)
    own = policy.needs_pybind11(program) or extension.pybind11 or common is None
    bound = policy.pybind11_headers(program.code) if own else policy.BINDING
    named = headers.write(
        program.code, program.includes, folder, bound, made_by_torch=common is None
    )
    named += ["pybind11"] if own else []
    beyond = [
        name
        for name in named
        if name.startswith(("torch/", "pybind11")) and name not in headers.SMALL
    ]
    note = "light headers" + (f" with {', '.join(beyond)}" if beyond else "")
    folders = [str(folder), str(headers.OWN), str(headers.OWN.parent)]
    asked = policy.conditions(program)
    differing = vocabulary.different(asked, folders, base, cxx) if asked else []
    if differing:
        raise MayLack(
            BuildError(
                f"a condition of its preprocessor names {differing[0]}, which torch/extension.h may define as another "
                "macro",
                op=extension.name,
                target=extension.purpose,
            )
        )
    files = frozenset(
        [*map(extension.place, extension.inputs), *(str(work / name) for name in INLINE)]
    )
    return Prepared(program, files, folders, base, cxx, [str(common)] if common else [], note)


def compiled_binding(base: Path, cxx: Compiler) -> Path | None:
    """Return the object file behind opjit_bind.h, pybind11's and torch's own code, made once for each compiler and torch with torch's own
    headers: the proof that it fits this torch. None if it does not compile. Raises OSError if the store's folder is not writable."""
    source = headers.OWN / "opjit_bind.cpp"

    def make(staged: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            headers.write(
                headers.code_of([source.read_text()]),
                (),
                Path(folder),
                policy.BINDING_NEEDS,
                made_by_torch=True,
            )
            places = (
                folder,
                headers.OWN,
                headers.INCLUDE,
                headers.INCLUDE / headers.API,
                sysconfig.get_path("include"),
            )
            try:
                runtime_objects.run(
                    cxx,
                    [
                        "-std=c++20",
                        "-O1",
                        "-fPIC",
                        "-fvisibility=hidden",
                        "-w",
                        *(f"-I{each}" for each in places),
                        "-c",
                        str(source),
                    ],
                    staged,
                )
            except BuildError as error:
                progress.log(
                    f"opjit's binding does not fit torch {torch.__version__}, so pybind11's is used: {error}"
                )
                (staged / _OBJECT).write_bytes(b"")  # it is not tried again

    content = [
        "binding",
        source.read_text(),
        (headers.OWN / "opjit_bind.h").read_text(),
        *vocabulary.versions(cxx),
    ]
    place = runtime_objects.kept(base, content, (_OBJECT,), make) / _OBJECT
    return place if place.stat().st_size else None

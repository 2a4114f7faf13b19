"""Light headers: torch's own text, as far as a program names it, in a tenth of the time of torch/extension.h; README.md has the proof.
`policy` says which programs may try, `prepare` writes the headers, `streams` proves that a program is the same text over them, and
`mistakes` says which errors are the author's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from opjit import files, progress
from opjit.builder import runtime_objects
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import headers, macros, policy, streams, vocabulary
from opjit.cpp_extension.light.policy import Program
from opjit.errors import BuildError, OpjitError
from opjit.recipe.toolchain import Compiler

INLINE = ("main.cpp", "cuda.cu")  # as torch names inline sources
VERSION = "5"  # increase it when light headers, or the split of CUDA files, make another binary of the same text; a test says when
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
    users: tuple[str, ...] = ()  # folders of headers that the author names

    def contents(self) -> list[tuple[str, str]]:
        """Return the SHA-256 of each light header, by path."""
        return sorted(
            (str(path), files.digest(str(path)))
            for folder in self.folders
            for path in Path(folder).rglob("*.h")
        )

    @property
    def trusted(self) -> list[str]:
        """The folders of opjit's files that versions in the key stand for: its headers, and the compiled binding."""
        return [str(headers.OWN), *(str(Path(each).parent) for each in self.objects)]

    @property
    def named(self) -> list[str]:
        """The headers of torch that the author's text names."""
        return [name for name in self.program.includes if headers.text_of(name) is not None]

    def check(self, source: str, command: str, work: Path, scratch: Path) -> None:
        """Raise streams.Different if torch's headers make other tokens of the author's text.

        `command` compiles `source` in the folder `work`. Files for that go to the folder `scratch`. Raises CompilerFailed if the
        preprocessor refuses the text."""
        light = {f"-I{folder}" for folder in self.folders}
        flags = [flag for flag in streams.flags_of(command, source) if flag not in light]
        preprocessor = streams.Preprocessor(
            self.cxx,
            self.base,
            work,
            scratch,
            flags,
            source,
            self.named,
            macros.Surroundings(tuple(headers.folders())),
            (*headers.folders(), *self.folders),
            self.users,
        )
        streams.compare_both(preprocessor, self.folders)


def prepare(
    extension: Extension, implicit: bool, work: Path, base: Path, cxx: Compiler
) -> Prepared:
    """Write the headers for an extension to the folder ``light`` in `work`, where it is compiled.

    `base` is the store's folder, which keeps the compiled part. Raises OSError if a source cannot be read or a folder is not writable."""
    program = policy.program_of(extension, implicit)
    folder = work / "light"
    common = compiled_binding(base, cxx)
    own = policy.needs_pybind11(program) or extension.pybind11 or common is None
    bound = policy.pybind11_headers(program.code) if own else list(policy.BINDING)
    words = program.code + streams.pasted(program.code, program.flags, work, cxx)
    named = headers.write(words, program.includes, folder, bound, made_by_torch=common is None)
    if own:
        named.append("pybind11")
    heavy = [name for name in named if name not in headers.SMALL]
    beyond = [name for name in heavy if name.startswith(("torch/", "pybind11"))]
    inputs = policy.authors_files(extension)
    return Prepared(
        program,
        frozenset([*inputs, *(str(work / name) for name in INLINE)]),
        [str(folder), str(headers.OWN), str(headers.OWN.parent)],
        base,
        cxx,
        [str(common)] if common else [],
        f"light headers with {', '.join(beyond)}" if beyond else "light headers",
        extension.include,
    )


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
            places = (folder, headers.OWN, *headers.folders())
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

"""Light headers: torch's headers reduced to the names that a program uses. They compile 10x faster than torch/extension.h.

README.md has the proof. `prepare` makes the parts that all sources of a program share. `headers` writes the headers that one source needs,
according to `policy` and `table`. `streams` proves that the source has the same tokens with them, and `mistakes` finds the errors that
torch/extension.h would not fix.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from opjit import files
from opjit.builder import parts
from opjit.cpp_extension.identity import LIGHT, own_folders, trusted_folders
from opjit.cpp_extension.light import core, headers, macros, policy, streams, vocabulary
from opjit.cpp_extension.light.policy import Program
from opjit.cpp_extension.light.streams import Preprocessor
from opjit.errors import BuildError, CompileWarning, OpjitError
from opjit.processes import CachedProperty
from opjit.recipe.compilers import Compiler

_OBJECT = "opjit_bind.o"


class NeedsFullHeaders(Exception):
    """Light headers may lack a declaration. `error` is for the user, if nvcc is missing, so that torch/extension.h cannot be used.

    If a build with torch/extension.h succeeds, its text was right, so a `preprocessor` that refused it was not.
    """

    def __init__(self, error: OpjitError, preprocessor: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.preprocessor = preprocessor


@dataclass(frozen=True)
class Prepared:
    """The headers and the binding of an extension. Each source has separate light headers, in ``light/OBJECT`` of the directory `work`."""

    base: Path  # folder of the store
    work: Path
    cxx: Compiler
    with_pybind11: bool  # whether every source uses pybind11's binding
    flags: tuple[str, ...]  # the extension's flags that define macros
    users: tuple[str, ...]  # folders of headers that the author names
    programs: dict[str, Program] = field(default_factory=dict)  # by object file
    brought: set[str] = field(default_factory=set)  # headers that names need
    cores: dict[tuple[str, ...], Path | None] = field(default_factory=dict)  # by their flags

    @CachedProperty
    def binding(self) -> Path | None:
        """The object file behind opjit_bind.h, which is made when a source first needs it."""
        return compiled_binding(self.base, self.cxx)

    @property
    def linked_binding(self) -> Path:
        """The path in the build folder by which a program is linked with the binding."""
        return self.work / "binding" / _OBJECT

    def provide_binding(self) -> None:
        """Put the binding, if it fits this torch, where the linker looks for it."""
        place = self.linked_binding
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        if self.binding is None:
            place.write_bytes(b"!<arch>\n")  # an archive without members
        else:
            place.symlink_to(self.binding)

    @property
    def folders(self) -> list[str]:
        """The directories that the compiler of every source searches before torch's."""
        return [str(headers.OWN), str(headers.OWN.parent)]

    @property
    def theirs(self) -> tuple[str, ...]:
        """The prefixes of paths of headers that are not the author's."""
        return (*own_folders(), *self.folders, str(self.work / "light"))

    @property
    def files(self) -> frozenset[str]:
        """The author's files."""
        return frozenset(path for program in self.programs.values() for path in program.files)

    @property
    def code(self) -> str:
        """The author's text without comments."""
        return "\n".join(program.code for program in self.programs.values())

    @property
    def note(self) -> str:
        """The headers that were used, for people, such as ``light headers with torch/library.h``."""
        beyond = sorted(self.brought - headers.SMALL)
        shown = [name for name in beyond if name.startswith(("torch/", "pybind11"))]
        return f"light headers with {', '.join(shown)}" if shown else "light headers"

    def versions(self) -> list[object]:
        """Return the inputs of the light headers of a text, apart from torch and the compiler."""
        return [LIGHT, _own_headers(), self.with_pybind11]

    def folder_of(self, out: str) -> Path:
        """Return the folder of light headers for the source of an object file."""
        return self.work / "light" / out

    def check(self, source: str, words: Sequence[str], out: str, scratch: Path) -> None:
        """Write the light headers that a source needs. Raise streams.Different if its text has other tokens with torch's headers.

        A compiler with `words` compiles `source` to `out` in the directory `work`. Temporary files go to the directory `scratch`.
        Raises CompilerFailed if the preprocessor refuses the text.
        """
        flags = streams.flags_of(words, source)
        self.compare([self.preprocessor(source, flags, self.work, scratch)], out)

    def preprocessor(
        self,
        source: str,
        flags: Iterable[str],
        work: Path,
        scratch: Path,
        around: macros.Surroundings = macros.Surroundings(),  # noqa: B008 - never changed
        theirs: tuple[str, ...] = (),
    ) -> Preprocessor:
        """Return the preprocessor of a source. Paths that start with one of `theirs` are also not the author's."""
        light = {f"-I{folder}" for folder in self.folders}
        given = [flag for flag in flags if flag not in light]
        theirs = (*self.theirs, *theirs)
        context = (self.cxx, self.base, work, scratch)
        return Preprocessor(*context, given, source, around, theirs, self.users)

    def compare(self, passes: Sequence[Preprocessor], out: str) -> None:
        """Write the light headers of a source, for all passes of its compiler, and compare its tokens as `check` does."""
        source = os.path.normpath(passes[0].work / passes[0].source)
        self.programs[out] = policy.program_of([source], self.flags)  # for a message about it
        texts = [each.text_with_torchs(streams.COUNTED) for each in passes]
        lines = list(map(Preprocessor.lines_of, passes, texts))
        streams.require_braces(Path(source), lines[0])
        words = dict.fromkeys(line.text for found in lines for line in found)
        paths = set[str]().union(*map(Preprocessor.files_of, passes, texts))
        self.write(out, paths, "\n".join(words))
        folders = [str(self.folder_of(out)), *self.folders]
        first = list[str]()
        if len(passes) == 1 and self.programs[out].names_torch:
            fits = partial(passes[0].takes_first, texts[0])
            first = self.write_first(passes[0].flags, out, fits)
        if any("__COUNTER__" in line for line in words):
            first = first[:2]  # the compiled core has another __COUNTER__ than COUNTED
        for each, found in zip(passes, lines, strict=True):
            text = each.run(each.real(), folders, [*first, *streams.COUNTED])
            streams.compare(found, each.lines_of(text))
        if streams.COUNTS.search(self.programs[out].code):
            raise streams.Different("it names __COUNTER__, and torch's headers count on")

    def write_first(
        self, flags: Sequence[str], out: str, fits: Callable[[core.Core], bool]
    ) -> list[str]:
        """Write the header that a source's compiler reads first: the core if it `fits`, next to the compiled one if there is one.

        Returns flags that include the header and, after these, read the compiled core.
        """
        found = core.core_of(flags, self.base, self.cxx)
        if found and not fits(found):
            found = None
        place = self.folder_of(out) / core.FIRST
        linked = place.with_name(core.COMPILED)
        linked.unlink(missing_ok=True)  # nvcc may follow NVRTC
        # Even if it is not compiled, for the same bytes.
        place.write_text(core.TEXT if found else "")
        first = ["-include", str(place)]
        # The core has the paths of its headers as they are.
        if not found or any("prefix-map=" in one and str(self.work) not in one for one in flags):
            return first
        if found.flags not in self.cores:  # a build asks once, however many sources it has
            self.cores[found.flags] = core.precompiled_core(found, self.base, self.cxx)
        if compiled := self.cores[found.flags]:
            linked.symlink_to(compiled)
            first.append("-fpch-preprocess")
        return first

    def write(self, out: str, paths: Iterable[str], words: str) -> None:
        """Write the light headers for the source of an object file. Its text is `words`, which the preprocessor read from `paths`."""
        program = policy.program_of(paths, self.flags)
        own = self.with_pybind11 or policy.needs_pybind11(program)
        bound = policy.pybind11_headers(program.code) if own else list(policy.BINDING)
        pasted = streams.PASTES.sub("", program.code)  # so that AT_DISPATCH_##x is a name in it
        text = "\n".join([program.code, words, pasted])
        self.brought.update(headers.write(text, program.includes, self.folder_of(out), bound))
        self.programs[out] = program
        if own:
            self.brought.add("pybind11")


def compiled_binding(base: Path, cxx: Compiler) -> Path | None:
    """Return the object file behind opjit_bind.h, which contains code of pybind11 and torch, or None if it does not compile.

    It is made once for each compiler and torch, with torch's headers, which proves that it fits this torch. Raises OSError if the store's
    directory is not writable.
    """
    source = headers.OWN / "opjit_bind.cpp"

    def make(staged: Path) -> None:
        folder = staged / "light"
        code = headers.code_of([source.read_text()])
        headers.write(code, (), folder, policy.BINDING_NEEDS)
        places = [f"-I{place}" for place in (folder, headers.OWN, *own_folders())]
        # GCC collects no garbage below 2 GB, which saves 7%.
        flags = "-std=c++20 -O1 -fPIC -fvisibility=hidden -w -c --param=ggc-min-heapsize=2000000"
        try:
            parts.compile_part(cxx, [*flags.split(), *places, str(source)], staged)
        except BuildError as error:
            warnings.warn(
                f"opjit's binding does not compile with torch {torch.__version__}, so torch/extension.h is used, which is slower: {error}",
                CompileWarning,
                stacklevel=2,
            )
            (staged / _OBJECT).write_bytes(b"")  # don't try again

    content = ["binding", source.read_text(), *_own_headers(), *vocabulary.versions(cxx)]
    covered = trusted_folders(str(headers.OWN))
    place = (
        parts.kept(base, parts.name_of(content, shared=True), (_OBJECT,), covered, make) / _OBJECT
    )
    return place if place.stat().st_size else None


def _own_headers() -> list[str]:
    """Return the digests of opjit's headers for extensions."""
    return [files.digest(str(path)) for path in sorted(headers.OWN.glob("*.h"))]

"""Compile and link an op's library: CUDA code with NVRTC or nvcc, and code of another device with that device's compiler."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from opjit import files, processes
from opjit.backends import Shared
from opjit.builder import (
    compile_warnings,
    glue,
    runtime_objects,
    torch_builder,
)
from opjit.builder.compile_step import CompilerFailed, by_nvrtc_or_nvcc, compile_by_own
from opjit.builder.torch_builder import quoted
from opjit.errors import BuildError
from opjit.recipe import compilers, libraries, nvcc_flags, recorder, toolchain
from opjit.recipe.compilers import Nvrtc
from opjit.recipe.flags import for_debugger
from opjit.recipe.nvcc_flags import LINE_INFO
from opjit.recipe.reads import Reads
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import BuildTools

# The compilers' identity, their output, and the inputs of opjit's runtime objects.
_Outcome = tuple[toolchain.ToolVersions, str, Reads]


class CompiledLibrary(NamedTuple):
    """A library that was compiled and linked."""

    path: Path
    generated: list[Path]  # the glue's files
    toolchain: dict[str, str]  # the compilers' identity
    output: str  # theirs, with their warnings
    parts: Reads  # the inputs of opjit's runtime objects
    remark: str = ""  # on the compiler of CUDA code, for the manifest


def compile_library(recipe: Recipe, work: Path, tools: BuildTools, base: Path) -> CompiledLibrary:
    """Compile and link: CUDA code with NVRTC or, failing that, nvcc, and code of another device
    with that device's compiler.
    """
    libraries.require_plain(recipe.name, recipe.flags)
    generated = glue.write(recipe.schema, recipe.target.backend, recipe.source.name, work)
    path = work / f"opjit_{files.random_name()}"
    compilation = _Compilation(recipe, work, tools, base, path, generated)
    plain = recipe
    if not recipe.flags.debug:  # nvcc names folders of this machine in line information
        flags = tuple(flag for flag in recipe.flags.cuda if flag not in LINE_INFO)
        plain = replace(recipe, flags=recipe.flags._replace(cuda=flags))
    (versions, output, read), remark = by_nvrtc_or_nvcc(
        str(recipe),
        tools,
        compilation.by_nvrtc,
        replace(compilation, recipe=plain).without_nvrtc,
        compilation.diagnosed,
    )
    if remark.startswith("nvcc") and plain != recipe:
        remark += "; without line information, in which nvcc names directories of this machine"
    return CompiledLibrary(path, generated, versions, output, read, remark)


@dataclass(frozen=True)
class _Compilation:
    """The compilation of a library in the folder `work`; `base` is the store's folder."""

    recipe: Recipe
    work: Path
    tools: BuildTools
    base: Path
    path: Path  # of the library
    generated: list[Path]  # the glue's files

    def by_nvrtc(self, nvrtc: Nvrtc) -> _Outcome:
        """Compile with NVRTC and the C++ compiler, and link."""
        from opjit.builder import cuda  # late: no op for a CPU needs it

        compiler = self.tools.compiler
        target = self.recipe.target
        linking = replace(self, tools=self.tools._replace(nvcc=None))
        found = nvrtc
        if toolchain.is_cross(target.host):
            stubbed, found = self._with_stubs(nvrtc)
            linking = replace(linking, recipe=stubbed)
        with processes.pool(1) as pool:
            making = pool.submit(self._make_parts)
            every = [*self.generated[1:], *self._wrappers()]
            registrations, kernels, output = cuda.compile_kernels(
                self.recipe, every, self.work, compiler, found
            )
            parts, read = making.result()
        cudart = f"-l:libcudart.so.{target.runtime.removeprefix('cuda')}"
        sources = [self.generated[0], *registrations]
        built = linking._build(sources, kernels, parts, [f"-L{found.runtime}", cudart])
        return toolchain.identity(compiler, nvrtc), output + built, read

    def without_nvrtc(self) -> _Outcome:
        """Compile C, or let nvcc or the device's compiler compile the kernels, and link."""
        tools = self.tools
        parts, read = self._make_parts()
        sources = [*self.generated, *self._wrappers()]
        kernels = list[Path]()
        output = ""
        if tools.own:
            try:
                kernels, output = compile_by_own(self.recipe, sources[1:], self.work, tools.own)
            except CompilerFailed as failed:
                raise self.diagnosed(str(failed)) from None
            sources = sources[:1]
        built = self._build(sources, kernels, parts)
        versions = toolchain.identity(tools.compiler, tools.nvcc or tools.own)
        return versions, output + built, read

    def diagnosed(self, output: str) -> BuildError:
        """Return the error for the output of a compiler that failed."""
        from opjit.builder.diagnosis import diagnose  # late: only a build that fails needs it

        recipe = self.recipe
        expected = str(recipe.source), glue.prototype(recipe.schema, recipe.target.backend)
        error = diagnose(output, recipe.name, recipe.purpose, self.base / "logs", expected)
        if recipe.label is not None:  # an inline source: its path means nothing to the user
            error.args = (str(error).replace(str(recipe.source), recipe.label),)
        return error

    def _with_stubs(self, nvrtc: Nvrtc) -> tuple[Recipe, Nvrtc]:
        """Name stubs in the place of CUDA's libraries here, which a linker for another processor refuses."""
        recipe = self.recipe
        cudart = f"libcudart.so.{recipe.target.runtime.removeprefix('cuda')}"
        libraries = [Shared(cudart, f"{nvrtc.runtime}/{cudart}"), *recipe.flags.shared]
        folder = self.work / "stubs"
        stubs = runtime_objects.stubs_of(libraries, self.tools.compiler, folder)
        stubbed = replace(recipe, flags=recipe.flags._replace(shared=stubs[1:]))
        return stubbed, nvrtc._replace(runtime=str(folder))

    def _make_parts(self) -> tuple[Path, Reads]:
        """Return the folder of parts to link with, by a path that a build file can name, and the inputs of the parts."""
        target = self.recipe.target
        flags = target.backend.flags(target.arch, target.runtime)
        if self.recipe.flags.debug:
            flags = for_debugger(flags)
        folder, read = runtime_objects.folder(self.base, self.tools.compiler, flags)
        link = self.work / "parts"
        if not link.is_symlink():  # as it is where nvcc follows NVRTC
            link.symlink_to(folder)
        return link, read

    def _wrappers(self) -> list[Path]:
        """Write a file for each of the author's other sources, which includes it: files of any names and paths can be built."""
        recipe = self.recipe
        paths = []
        for number, source in enumerate(recipe.flags.sources):
            path = self.work / f"opjit_source{number}{recipe.target.backend.suffix}"
            text = f'#include "{os.path.relpath(source, recipe.folder)}"\n'
            path.write_text(text, "utf-8", "surrogateescape")
            paths.append(path)
        return paths

    def _build(
        self, sources: list[Path], kernels: list[Path], parts: Path, runtime: Sequence[str] = ()
    ) -> str:
        """Compile sources, the glue first, and link them with the kernels' object files, by torch's load and ninja."""
        compiler = self.tools.compiler.path
        nvcc = self.tools.nvcc
        include = [f"-I{folder}" for folder in self.recipe.include_path]
        cuda = self._in_place(self.recipe.flags.cuda)
        for folder in libraries.include_folders(self.recipe.flags.shared):
            cuda += ["-isystem", folder]
        arguments = {
            "name": self.path.name,
            "sources": list(map(str, sources)),
            "extra_cflags": quoted(
                [*include, *compile_warnings.DEFAULT, *self._in_place(self.recipe.flags.c)]
            ),
            "extra_cuda_cflags": quoted(nvcc_flags.for_nvcc(include, cuda)),
            "extra_ldflags": quoted(self._link_flags(kernels, parts, runtime)),
            "build_directory": str(self.work),
            "with_cuda": nvcc is not None,
            "is_python_module": False,
            "is_standalone": True,  # torch's build file makes an executable; -shared makes it a library
        }
        environment = {
            **compilers.NEUTRAL,
            **recorder.watching(self.work / recorder.LOG),
            "TMPDIR": str(self.work),
            "CC": compiler,  # nvcc's host compiler
            "CXX": compiler,  # the glue is C, so no C++ compiler is needed
            "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # C has one ABI
        }
        variables = {
            "TORCH_LIB_PATH": "'$$ORIGIN'",  # makes the run path that torch adds a constant; it is removed from the library
            "CUDA_HOME": nvcc.root if nvcc else None,
        }
        try:
            return torch_builder.run_build(arguments, environment, variables)
        except CompilerFailed as failed:
            raise self.diagnosed(str(failed)) from None

    def _in_place(self, flags: Iterable[str]) -> list[str]:
        """Return flags with the paths of this build."""
        paths = self.recipe.placeholders(self.work)
        return [flag.format(**paths) for flag in flags]

    def _link_flags(self, kernels: list[Path], parts: Path, runtime: Sequence[str]) -> list[str]:
        flags = self.recipe.flags
        objects = [*kernels, *(parts / name for name in runtime_objects.OBJECTS)]
        stubs = [f"-l{stub.removeprefix('lib')}" for stub in flags.stubs]
        return [
            *map(str, objects),
            "-shared",
            "-fno-lto",
            f"-L{parts}",
            "-Wl,--no-as-needed",
            *stubs,
            "-Wl,--as-needed",
            *runtime,
            *libraries.arguments(flags),
            *([] if flags.debug else ["-Wl,-s"]),
            "-Wl,-z,defs",
            "-Wl,--gc-sections",
        ]

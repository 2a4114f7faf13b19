"""Compile and link an op's library: CUDA code with NVRTC or nvcc, and code of another device with that device's compiler."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from opjit.backends import Flags, Shared
from opjit.builder import (
    budget,
    compile_warnings,
    cuda,
    glue,
    runtime_objects,
    torch_builder,
)
from opjit.builder.compile_step import (
    BuildTools,
    CompilerFailed,
    by_nvrtc_or_nvcc,
    compile_by_own,
)
from opjit.builder.diagnosis import diagnose
from opjit.errors import BuildError
from opjit.recipe import compilers, libraries, nvcc_flags, toolchain, unreported
from opjit.recipe.compilers import Compiler, Nvrtc
from opjit.recipe.flags import for_debugger
from opjit.recipe.nvcc_flags import LINE_INFO
from opjit.recipe.reads import NOTHING, Reads
from opjit.recipe.recipe import Recipe
from opjit.recipe.reports import LINKED


class CompiledLibrary(NamedTuple):
    """A library that was compiled and linked."""

    toolchain: dict[str, str]  # the compilers' identity
    output: str  # theirs, with their warnings
    remark: Mapping[str, str] = MappingProxyType({})  # on them, for the manifest
    parts: Reads = NOTHING  # the inputs of opjit's runtime objects


def compile_library(
    recipe: Recipe, name: str, sources: list[Path], work: Path, tools: BuildTools, base: Path
) -> CompiledLibrary:
    """Compile and link: CUDA code with NVRTC or, failing that, nvcc, and code of another device
    with that device's compiler.
    """
    libraries.require_plain(recipe.name, recipe.flags)
    flags = recipe.target.backend.flags(recipe.target.arch, recipe.target.runtime)
    flags = for_debugger(flags) if recipe.flags.debug else flags

    def by_nvrtc(nvrtc: Nvrtc) -> CompiledLibrary:
        linking_to, found = (
            _with_stubs(recipe, nvrtc, tools.compiler, work)
            if toolchain.is_other(recipe.target.host)
            else (recipe, nvrtc)
        )
        with ThreadPoolExecutor(1) as pool:
            linking = pool.submit(_parts, base, tools.compiler, flags, work)
            every = [*sources[1:], *_including(recipe, work)]
            registrations, kernels, said = cuda.compile_kernels(
                recipe, every, work, tools.compiler, found
            )
            linked, parts = linking.result()
        objects = [*kernels, *(linked / part for part in runtime_objects.OBJECTS)]
        runtime = (
            f"-L{found.runtime}",
            f"-l:libcudart.so.{recipe.target.runtime.removeprefix('cuda')}",
        )
        said += _link(
            linking_to,
            name,
            [sources[0], *registrations],
            objects,
            runtime,
            linked,
            work,
            tools._replace(nvcc=None),
            base,
        )
        return CompiledLibrary(toolchain.identity(tools.compiler, nvrtc), said, parts=parts)

    def by_others() -> CompiledLibrary:
        kept = tuple(flag for flag in recipe.flags.cuda if flag not in hidden)
        shown = replace(recipe, flags=recipe.flags._replace(cuda=kept))
        linked, parts = _parts(base, tools.compiler, flags, work)
        every = [*sources, *_including(shown, work)]
        kernels = list[Path]()
        said = ""
        if tools.own:
            try:
                kernels, said = compile_by_own(shown, every[1:], work, tools.own)
            except CompilerFailed as failed:
                raise _diagnosed(shown, str(failed), base) from None
        objects = [*kernels, *(linked / part for part in runtime_objects.OBJECTS)]
        output = _link(
            shown, name, every[:1] if tools.own else every, objects, (), linked, work, tools, base
        )
        versions = toolchain.identity(tools.compiler, tools.nvcc or tools.own)
        return CompiledLibrary(versions, said + output, parts=parts)

    hidden = (
        set() if recipe.flags.debug else LINE_INFO
    )  # in which nvcc names folders of this machine
    library, remark = by_nvrtc_or_nvcc(
        str(recipe), tools, by_nvrtc, by_others, lambda output: _diagnosed(recipe, output, base)
    )
    if remark.startswith("nvcc") and hidden & {*recipe.flags.cuda}:
        remark += "; without line information, in which nvcc names folders of this machine"
    return library._replace(remark={"cuda": remark} if remark else {})


def _with_stubs(
    recipe: Recipe, nvrtc: Nvrtc, compiler: Compiler, work: Path
) -> tuple[Recipe, Nvrtc]:
    """Name stubs in the place of CUDA's libraries here, which a linker for another processor refuses."""
    cudart = f"libcudart.so.{recipe.target.runtime.removeprefix('cuda')}"
    libraries = [Shared(cudart, f"{nvrtc.runtime}/{cudart}"), *recipe.flags.shared]
    stubs = runtime_objects.stubs_of(libraries, compiler, work / "stubs")
    stubbed = replace(recipe, flags=recipe.flags._replace(shared=stubs[1:]))
    return stubbed, nvrtc._replace(runtime=str(work / "stubs"))


def _parts(base: Path, compiler: Compiler, flags: Flags, work: Path) -> tuple[Path, Reads]:
    """Return the folder of parts to link with, by a path that a build file can name, and what made them."""
    folder, read = runtime_objects.folder(base, compiler, flags)
    link = work / "parts"
    if not link.is_symlink():  # as it is where nvcc follows NVRTC
        link.symlink_to(folder)
    return link, read


def _including(recipe: Recipe, work: Path) -> list[Path]:
    """Write a file for each of the author's other sources, which includes it: files of any names and paths can be built."""
    suffix = recipe.target.backend.suffix
    paths = [work / f"opjit_source{number}{suffix}" for number in range(len(recipe.flags.sources))]
    for path, source in zip(paths, recipe.flags.sources, strict=True):
        path.write_text(
            f'#include "{os.path.relpath(source, recipe.folder)}"\n', "utf-8", "surrogateescape"
        )
    return paths


def _link(
    recipe: Recipe,
    name: str,
    sources: list[Path],
    objects: list[Path],
    link: Iterable[str],
    linked: Path,
    work: Path,
    tools: BuildTools,
    base: Path,
) -> str:
    """Compile sources, the glue first, and link them with object files, by torch's load. Returns the tools' output."""
    flags = recipe.flags
    places = {**recipe.placeholders(work), "unique": torch_builder.UNIQUE}
    include = [f"-I{folder}" for folder in recipe.include_path]
    listing = compilers.dependency_flags(tools.compiler, torch_builder.UNIQUE)
    c = [
        *include,
        *compile_warnings.DEFAULT,
        unreported.DATE_WARNING,
        *(flag.format(**places) for flag in flags.c),
        *listing,
    ]
    cuda = [
        *(flag.format(**places) for flag in flags.cuda),
        *(
            part
            for folder in libraries.include_folders(flags.shared)
            for part in ("-isystem", folder)
        ),
        *(part for flag in listing for part in ("-Xcompiler", flag)),
    ]
    stubs = [f"-l{stub.removeprefix('lib')}" for stub in flags.stubs]
    link = [
        *map(str, objects),
        "-shared",
        "-fno-lto",
        f"-L{linked}",
        "-Wl,--no-as-needed",
        *stubs,
        "-Wl,--as-needed",
        *link,
        *libraries.arguments(flags),
        *([] if flags.debug else ["-Wl,-s"]),
        "-Wl,-z,defs",
        "-Wl,--gc-sections",
        f"-Wl,--dependency-file={LINKED},--verbose",
    ]
    environment = {
        **compilers.NEUTRAL,
        "CC": tools.compiler.path,  # nvcc's host compiler
        "CXX": tools.compiler.path,  # the glue is C, so no C++ compiler is needed
        "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1",  # the flags of opjit make the complete list
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # C has one ABI
        "PYTORCH_NVCC": None,
    }
    try:
        return torch_builder.call(
            "load",
            {
                "name": name,
                "sources": [str(source) for source in sources],
                "extra_cflags": [*map(torch_builder.quote, c)],
                "extra_cuda_cflags": [
                    *map(torch_builder.quote, nvcc_flags.for_nvcc(include, cuda))
                ],
                "extra_ldflags": [*map(torch_builder.quote, link)],
                "build_directory": str(work),
                "with_cuda": tools.nvcc is not None,
                "is_python_module": False,
                "is_standalone": True,  # torch's build file makes an executable; -shared makes it a library
            },
            tools.ninja,
            environment,
            {
                "TORCH_LIB_PATH": "'$$ORIGIN'",  # makes the run path that torch adds a constant; it is removed from the library
                "CUDA_HOME": tools.nvcc.root if tools.nvcc else None,
            },
            (budget.C_JOB, budget.NVCC_JOB),
        )
    except CompilerFailed as failed:
        raise _diagnosed(recipe, str(failed), base) from None


def _diagnosed(recipe: Recipe, output: str, base: Path) -> BuildError:
    expected = str(recipe.source), glue.prototype(recipe.schema, recipe.target.backend)
    error = diagnose(output, recipe.name, recipe.purpose, base / "logs", expected)
    if recipe.label is not None:  # an inline source: its path means nothing to the user
        error.args = (str(error).replace(str(recipe.source), recipe.label),)
    return error

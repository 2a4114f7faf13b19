"""The compilers' commands for a shared library."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from opjit import processes, progress
from opjit.builder import budget, runtime_objects
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Compiled, build_and_publish
from opjit.errors import OpjitError, ToolMissing, UnknownArch
from opjit.recipe import libraries, nvcc_flags, reads, toolchain, unreported
from opjit.recipe.command_line import is_same_anywhere
from opjit.recipe.compilers import Compiler, Nvcc
from opjit.recipe.reads import Moment, Reads
from opjit.recipe.reports import (
    ASSEMBLED,
    LINKED,
    LISTED,
    ReportReader,
    trusted_prefixes,
)
from opjit.shared_library import identity
from opjit.shared_library.identity import Library, Tools
from opjit.shared_library.objects import KeptObjects
from opjit.store.entry import Entry
from opjit.store.store import Store

_NO_ARCH = re.compile(r"Unsupported gpu architecture '(\w+)'")
_NEEDS = {".cu": budget.NVCC_JOB, **dict.fromkeys((".cpp", ".cc", ".cxx"), budget.CXX_JOB)}
_OF_DRIVER = re.compile(r"\bU (cu[A-Z]\w*)")
_RELOCATABLE = re.compile(r"(?:^| )(?:-rdc|--relocatable-device-code)[= ]true(?: |$)")


def build_library_binary(library: Library, store: Store, must_store: bool = False) -> Entry:
    """Build a library and publish it; see `publish`. Raises what `opjit.build` raises."""
    if library.launcher and shutil.which(library.launcher[0]) is None:
        raise ToolMissing(
            library.launcher[0],
            f"no launcher {library.launcher[0]}: install it, or remove launcher=",
        )
    tools = identity.find_tools(library.languages, store.notes)

    def compile_in(work: Path, base: Path, started: int) -> Compiled:
        made = replace(library, toolchain=identity.versions(tools))
        build = _LibraryBuild(made, tools, work, base, started, store.notes)
        linker, read = build.run()
        return Compiled(made, work / "library.so", linker, read)

    return build_and_publish(library, store, must_store, compile_in)


def write_commands(library: Library, store: Store, place: Path) -> None:
    """Write a compile_commands.json, and the generated files next to it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    tools = identity.find_tools(library.languages, store.notes)
    before = _compilers(library, tools, place.parent)
    folder = os.getcwd()
    listed = [
        {"directory": folder, "file": command[-3], "output": command[-1], "arguments": command}
        for command in _sources(library, before, place.parent)
    ]
    place.write_text(json.dumps(listed, indent=1), "utf-8", "surrogateescape")


def _compilers(library: Library, tools: Tools, work: Path) -> dict[str, list[str]]:
    """Return the start of each language's commands."""
    # Keep paths of this machine out of the binary. The last matching map wins.
    folders = [*library.include, library.folder, f"{work}/generated"]
    # A precompiled header, which no list has, is taken for the first header only.
    common = [
        "-include",
        os.devnull,
        "-fPIC",
        f"-ffile-prefix-map={os.getcwd()}=.",
        *(f"-ffile-prefix-map={folder}/=" for folder in folders),
    ]
    c = tools.get("c")
    cxx = tools.get("c++")
    nvcc = tools.get("cuda")
    found: dict[str, list[str]] = {}
    if isinstance(c, Compiler):
        found["c"] = [c.path, "-O2", *common]
    if isinstance(cxx, Compiler):
        found["c++"] = [cxx.path, "-std=c++17", "-O2", *common]
        if isinstance(nvcc, Nvcc):
            found["cuda"] = [
                f"{nvcc.root}/bin/nvcc",
                "-ccbin",
                cxx.path,
                "-std=c++17",
                "-O2",
                *_gencode(library),
                *nvcc_flags.for_nvcc(common, []),
            ]
    return found


def _gencode(library: Library) -> list[str]:
    return [
        f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in library.archs
    ]


def _reporting(library: Library, language: str, place: str) -> list[str]:
    """Return the flags that make compilers list the files that they read, and warn of macros for
    the date.
    """
    lists = ["-MD", "-MF", f"{place}{LISTED}"]
    warnings = [unreported.DATE_WARNING, "-Wno-error=date-time"]
    version = (library.toolchain or {}).get("c" if language == "c" else "c++", "")
    if "gcc version" in version:
        warnings += ["-Xassembler", "--MD", "-Xassembler", f"{place}{ASSEMBLED}"]
    if language == "cuda":
        warnings = nvcc_flags.for_nvcc(warnings, [])
    return [*lists, *warnings]


def _sources(library: Library, before: Mapping[str, list[str]], work: Path) -> list[list[str]]:
    """Write the generated files, and return the commands for the current folder, each ending with the source, -o and the object."""
    for name, content in library.generated.items():
        place = work / "generated" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    include = [
        f"-I{folder}"
        for folder in ([f"{work}/generated"] if library.texts else []) + [*library.include]
    ]
    found = []
    for number, source in enumerate(
        [*library.sources, *(f"{work}/generated/{name}" for name in library.generated)]
    ):
        language = identity.LANGUAGES.get(os.path.splitext(source)[1])
        if language is not None:
            flags = (
                [f"--frandom-seed={number}", *library.given["cuda_cflags"]]
                if language == "cuda"
                else library.given["cflags"]
            )
            launcher = (
                library.launcher or toolchain.split_launcher("CC" if language == "c" else "CXX")[0]
            )
            found.append(
                [
                    *launcher,
                    *before[language],
                    *include,
                    *flags,
                    *_reporting(library, language, f"{work}/{number}"),
                    "-c",
                    source,
                    "-o",
                    f"{work}/{number}.o",
                ]
            )
    return found


class _LibraryBuild:
    """One build in the private folder `work`; `base` is the store's, and `started` a time of `files.tick`."""

    def __init__(
        self,
        library: Library,
        tools: Tools,
        work: Path,
        base: Path,
        started: int,
        notes: Path | None,
    ) -> None:
        self.library = library
        self.tools = tools
        self.work = work
        self.base = base
        self.nvcc = tools.get("cuda")
        self.driver = tools.get("c++") or tools.get("c")
        self.before = _compilers(library, tools, work)
        self.searched = identity.searched(tools, library.include, library.given, notes)
        moment = Moment(library.texts)
        roots = [self.nvcc.root] if isinstance(self.nvcc, Nvcc) else []
        self.recorder = ReportReader(
            str(work),
            os.getcwd(),
            moment,
            library.places.system,
            trusted_prefixes(roots, library.places.system),
            started,
        )
        self.objects = KeptObjects(library, base, work, None, moment)

    def run(self) -> tuple[str, Reads]:
        """Compile in parallel, then link.

        Returns the linker, and the files that all tools read. Raises CompileError with the first
        source's complaint.
        """
        commands = _sources(self.library, self.before, self.work)
        try:
            compile_one = self._compile if len(commands) > 1 else self._once
            read = processes.in_parallel(compile_one, commands, budget.width(budget.C_JOB))
            linker, linked = self._link([command[-1] for command in commands])
        except CompilerFailed as failed:
            raise self._diagnosed(str(failed)) from None
        return linker, functools.reduce(Reads.joined, [*read, linked])

    def _compile(self, command: list[str]) -> Reads:
        """Compile a source, unless its object is kept."""
        source = command[-3]
        place = Path(command[-1])
        text = shlex.join(command)
        if not self.objects.take(source, text, place):
            self.objects.keep(source, text, place, self._once(command))
        return self.objects.read[place]

    def _once(self, command: list[str]) -> Reads:
        output = self._tool(command)
        place = Path(command[-1])
        language = identity.LANGUAGES[os.path.splitext(command[-3])[1]]
        kind = "cuda_cflags" if language == "cuda" else "cflags"
        listings = [place.with_suffix(LISTED)]
        assembled = [each for each in [place.with_suffix(ASSEMBLED)] if each.is_file()]
        return self.recorder.compiled(
            reads.listed(listings),
            reads.listed(assembled),
            self.searched[language],
            output,
            self.library.given[kind],
        )

    def _tool(self, command: list[str], folder: Path | None = None) -> str:
        progress.logger().debug("%s", " ".join(command))
        need = _NEEDS.get(os.path.splitext(command[-3])[1], budget.C_JOB)
        return run_tool(command, folder or Path.cwd(), need)

    def _link(self, objects: list[str]) -> tuple[str, Reads]:
        """Link objects.

        Objects with relocatable device code are first linked for the device. Returns the linker and
        the files that it read.
        """
        library = self.library
        nvcc = self.nvcc
        work = self.work
        assert isinstance(self.driver, Compiler)
        cuda = []
        if isinstance(nvcc, Nvcc):
            cuda = [f"-L{nvcc.root}/lib64", f"-L{nvcc.root}/lib64/stubs", "-lcudart"]
            if _RELOCATABLE.search(" ".join(library.given["cuda_cflags"])):
                cuda = [f"{work}/device.o", f"-L{nvcc.root}/lib64", "-lcudadevrt", *cuda]
                self._tool(self._device_link(objects, nvcc))
        (work / "cuda").mkdir()
        self._add_cuda_libraries(objects)
        command = [
            self.driver.path,
            "-shared",
            *objects,
            *library.given["ldflags"],
            *cuda,
            f"-L{work}/cuda",
            "-Xlinker",
            f"--dependency-file={work}/{LINKED}",
            "-Wl,--verbose",
            "-o",
            f"{work}/library.so",
        ]
        anywhere = is_same_anywhere(library.given["ldflags"], library.places)
        folder = work if anywhere else Path(self.recorder.folder)
        linking = replace(self.recorder, folder=str(folder))
        output = self._tool(command, folder)
        read = linking.linked(work / LINKED, output)
        if "-lcuda" in library.given["ldflags"]:  # archives may also call the driver
            archives = [path for path in read.digests if path.endswith((".a", ".o"))]
            self._add_cuda_libraries([*objects, *archives])
            output = self._tool(command, folder)
            read = linking.linked(work / LINKED, output)
        return self.driver.path, read

    def _device_link(self, objects: list[str], nvcc: Nvcc) -> list[str]:
        flags = nvcc_flags.joined(self.library.given["cuda_cflags"])
        return [
            *self.before["cuda"][:3],
            *_gencode(self.library),
            *(flag for flag in flags if identity.NAMES_ARCH.match(flag)),
            "-Xcompiler",
            "-fPIC",
            "-dlink",
            *objects,
            f"-L{nvcc.root}/lib64",
            "-lcudadevrt",
            "-o",
            f"{self.work}/device.o",
        ]

    def _add_cuda_libraries(self, objects: list[str]) -> None:
        """Put CUDA libraries into the directory that the linker searches last: the libraries of
        pip, and a stub with the soname of the GPU driver and the functions that objects call,
        because only machines with a GPU have the driver.
        """
        folder = self.work / "cuda"
        named = {flag[2:] for flag in self.library.given["ldflags"] if flag.startswith("-l")}
        nvcc = self.nvcc
        runtime = f"cuda{nvcc.version.partition('.')[0]}" if isinstance(nvcc, Nvcc) else ""
        for name in named & libraries.OF_TORCH:
            found = libraries.find_cuda_library(name, runtime)
            if found is not None and not (folder / f"lib{name}.so").is_symlink():
                (folder / f"lib{name}.so").symlink_to(found.path)
        if "cuda" in named and isinstance(self.driver, Compiler):
            undefined = run_tool(["nm", "-u", *objects], self.work)
            called = sorted({*_OF_DRIVER.findall(undefined)})
            runtime_objects.stub(self.driver, "libcuda.so.1", called, folder)
            if not (folder / "libcuda.so").is_symlink():
                (folder / "libcuda.so").symlink_to("libcuda.so.1")

    def _diagnosed(self, output: str) -> OpjitError:
        library = self.library
        unknown = _NO_ARCH.search(output)
        if unknown is not None:
            return UnknownArch(
                f"opjit.build of {library.name!r}: nvcc does not support {unknown[1]}; change archs=, or install a newer "
                "CUDA Toolkit"
            )
        shown = output.replace(f"{self.work}/generated/", "")
        return diagnose(shown, library.name, library.purpose, self.base / "logs")

"""The compilers' commands for a shared library."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from opjit.builder import budget, ninja, runtime_objects
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.builder.ninja import ToolCommand
from opjit.builder.publish import Compiled, build_and_publish
from opjit.errors import OpjitError, ToolMissing, UnknownArch
from opjit.recipe import libraries, nvcc_flags, recorder, toolchain
from opjit.recipe.compilers import Nvcc
from opjit.recipe.reads import Moment, Reads, trusted_prefixes
from opjit.recipe.record_reader import RecordReader
from opjit.recipe.toolchain import BuildTools
from opjit.shared_library import identity
from opjit.shared_library.identity import Library
from opjit.shared_library.objects import KeptObjects
from opjit.store.entry import Entry
from opjit.store.store import Store

_NO_ARCH = r"Unsupported gpu architecture '(\w+)'"
_OF_DRIVER = r"\bU (cu[A-Z]\w*)"
_RELOCATABLE = r"(?:^| )(?:-rdc|--relocatable-device-code)[= ]true(?: |$)"


def build_library_binary(library: Library, store: Store, must_store: bool = False) -> Entry:
    """Build a library and publish it; see `publish`. Raises what `opjit.build` raises."""
    if library.launcher and shutil.which(library.launcher[0]) is None:
        raise ToolMissing(
            library.launcher[0],
            f"no launcher {library.launcher[0]}: install it, or remove launcher=",
        )
    tools = identity.find_tools(library.languages, store.notes)

    def compile_in(library: Library, work: Path, base: Path, started: int) -> Compiled:
        made = replace(library, toolchain=identity.versions(tools))
        build = _LibraryBuild(made, tools, work, base, started)
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
        {
            "directory": folder,
            "file": step.source,
            "output": str(step.output),
            "arguments": step.command,
        }
        for step in _sources(library, before, place.parent)
    ]
    place.write_text(json.dumps(listed, indent=1), "utf-8", "surrogateescape")


def _compilers(library: Library, tools: BuildTools, work: Path) -> dict[str, list[str]]:
    """Return the start of each language's commands."""
    # Keep paths of this machine out of the binary. The last matching map wins.
    folders = [*library.include, library.places.folder, f"{work}/generated"]
    common = [
        "-fPIC",
        f"-ffile-prefix-map={os.getcwd()}=.",
        *(f"-ffile-prefix-map={folder}/=" for folder in folders),
    ]
    found = dict[str, list[str]]()
    if tools.cc:
        found["c"] = [tools.cc.path, "-O2", *common]
    if tools.cxx:
        found["c++"] = [tools.cxx.path, "-std=c++17", "-O2", *common]
        if tools.nvcc:
            found["cuda"] = [
                f"{tools.nvcc.root}/bin/nvcc",
                "-ccbin",
                tools.cxx.path,
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


def _sources(library: Library, before: Mapping[str, list[str]], work: Path) -> list[ToolCommand]:
    """Write the generated files, and return the steps that compile sources."""
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
            output = work / f"{number}.o"
            command = [*launcher, *before[language], *include, *flags]
            command += ["-c", source, "-o", str(output)]
            found.append(ToolCommand(command, output, Path.cwd(), (), source))
    return found


class _LibraryBuild:
    """One build in the private folder `work`; `base` is the store's, and `started` a time of `files.tick`."""

    def __init__(
        self, library: Library, tools: BuildTools, work: Path, base: Path, started: int
    ) -> None:
        self.library = library
        self.tools = tools
        self.work = work
        self.base = base
        self.before = _compilers(library, tools, work)
        moment = Moment(library.texts)
        trusted = trusted_prefixes(tools.folders, library.places.system)
        self.objects = KeptObjects(library, base, RecordReader(str(work), moment, trusted, started))

    def run(self) -> tuple[str, Reads]:
        """Compile and link by ninja.

        Returns the linker, and the files that all tools read. Raises CompileError with the first
        source's complaint.
        """
        every = _sources(self.library, self.before, self.work)
        steps = self.objects.missing(every)
        objects = [str(step.output) for step in every]
        linking = self._link(objects)
        try:
            if "-lcuda" in self.library.given["ldflags"]:
                ninja.run_commands(steps, self.work, need=budget.CXX_JOB)
                self._add_driver(objects)
                ninja.run_commands(linking, self.work)
                linking = self._link_archives(linking)
            else:
                ninja.run_commands([*steps, *linking], self.work, need=budget.CXX_JOB)
        except CompilerFailed as failed:
            self.objects.keep(steps)
            raise self._diagnosed(str(failed)) from None
        self.objects.keep(steps)
        return self.tools.compiler.path, self.objects.read_by_all(linking)

    def _link(self, objects: list[str]) -> list[ToolCommand]:
        """Return the steps that link objects.

        Objects with relocatable device code are first linked for the device.
        """
        library = self.library
        nvcc = self.tools.nvcc
        work = self.work
        cuda = []
        steps = []
        paths = [Path(each) for each in objects]
        if nvcc:
            cuda = [f"-L{nvcc.root}/lib64", f"-L{nvcc.root}/lib64/stubs", "-lcudart"]
            if re.search(_RELOCATABLE, " ".join(library.given["cuda_cflags"])):
                cuda = [f"{work}/device.o", f"-L{nvcc.root}/lib64", "-lcudadevrt", *cuda]
                command = self._device_link(objects, nvcc)
                steps.append(ToolCommand(command, work / "device.o", Path.cwd(), paths))
        (work / "cuda").mkdir()
        self._add_cuda_libraries()
        command = [
            self.tools.compiler.path,
            "-shared",
            *objects,
            *library.given["ldflags"],
            *cuda,
            f"-L{work}/cuda",
            "-o",
            f"{work}/library.so",
        ]
        needs = [*paths, *(step.output for step in steps)]
        return [*steps, ToolCommand(command, work / "library.so", Path.cwd(), needs)]

    def _link_archives(self, linking: Sequence[ToolCommand]) -> list[ToolCommand]:
        """Link again with a stub of the GPU driver that has the functions which archives call as well. Returns the steps."""
        link = linking[-1]
        opened = recorder.read([link.log]).opened
        self._add_driver([path for path in opened if path.endswith((".a", ".o"))])
        link.output.unlink()
        link.log.unlink(missing_ok=True)
        ninja.run_commands([link], self.work)
        return [*linking[:-1], link]

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

    def _add_cuda_libraries(self) -> None:
        """Put the CUDA libraries of pip into the directory that the linker searches last."""
        folder = self.work / "cuda"
        named = {flag[2:] for flag in self.library.given["ldflags"] if flag.startswith("-l")}
        nvcc = self.tools.nvcc
        runtime = f"cuda{nvcc.version.partition('.')[0]}" if nvcc else ""
        for name in named & libraries.OF_TORCH:
            found = libraries.find_cuda_library(name, runtime)
            if found is not None:
                (folder / f"lib{name}.so").symlink_to(found.path)

    def _add_driver(self, objects: list[str]) -> None:
        """Make a stub of the GPU driver, which only machines with a GPU have: its soname, and the functions that objects call."""
        folder = self.work / "cuda"
        undefined = run_tool(["nm", "-u", *objects], self.work)
        called = sorted({*re.findall(_OF_DRIVER, undefined)})
        runtime_objects.stub(self.tools.compiler, "libcuda.so.1", called, folder)
        if not (folder / "libcuda.so").is_symlink():
            (folder / "libcuda.so").symlink_to("libcuda.so.1")

    def _diagnosed(self, output: str) -> OpjitError:
        from opjit.builder.diagnosis import diagnose  # late: only a build that fails needs it

        library = self.library
        unknown = re.search(_NO_ARCH, output)
        if unknown is not None:
            return UnknownArch(
                f"opjit.build of {library.name!r}: nvcc does not support {unknown[1]}; change archs=, or install a newer "
                "CUDA Toolkit"
            )
        shown = output.replace(f"{self.work}/generated/", "")
        return diagnose(shown, library.name, library.purpose, self.base / "logs")

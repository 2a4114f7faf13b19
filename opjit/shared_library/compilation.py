"""Builds a shared library in a private folder with the compilers alone, and publishes the entry."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files, processes, progress
from opjit.builder import budget
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Subject, publish, write_entry
from opjit.errors import BuildError, EntryError, ToolMissing, UnknownArch
from opjit.recipe import headers, nvcc_flags, toolchain
from opjit.recipe.toolchain import Compiler, Nvcc
from opjit.shared_library import identity
from opjit.shared_library.identity import Library
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store

COMMANDS = "compile_commands.json"
_NO_ARCH = re.compile(r"Unsupported gpu architecture '(\w+)'")


class BuildCommands(NamedTuple):
    """The commands of a build: of each source, by its object's name, and then of the link."""

    sources: dict[str, tuple[str, list[str]]]
    link: list[list[str]]

    def dump(self) -> str:
        """Return the content of a compile_commands.json."""
        return json.dumps([{"directory": os.getcwd(), "file": source, "output": name, "arguments": command}
                           for name, (source, command) in self.sources.items()], indent=1)


def build(library: Library, store: Store, must_store: bool = False) -> Entry:
    """Build a library and publish it in the store or, if the store cannot be written, for this process only.

    Raises:
        ToolMissing, CompileError, UnknownArch, BuildError: see `opjit.build`.
    """
    tools = find_tools(library, store)
    library = replace(library, toolchain=identity.versions(tools))
    subject = Subject(library.name, library.purpose, None, store.base / library.place_of_entries, headers.unreadable(library.inputs),
                      must_store)

    def make(staged: Path, base: Path) -> Manifest:
        work = staged / "build"
        work.mkdir(mode=0o700)
        started = time.time_ns()
        progress.step("compiling")
        commands = commands_of(library, tools, work)
        _run(library, commands, work, base)
        seconds = (time.time_ns() - started) / 1e9
        progress.step("checking")
        document = {**library.document(), "found": _headers_found(library, subject, tools, work, started)}
        if not subject.unread and library.scanned().inputs != library.inputs:
            raise subject.fault("sources changed during compilation; build it again")
        try:
            content = (work / "library.so").read_bytes()
            elf.inspect(content)
        except (FileNotFoundError, EntryError) as error:
            raise subject.fault(f"the compilers reported success but left no valid library: {error}") from None
        (work / COMMANDS).write_text(commands.dump(), "utf-8", "surrogateescape")
        return write_entry(staged / "entry", re.sub(r"\W", "_", library.name) + ".so", content, [work / COMMANDS], document,
                           {"seconds": f"{seconds:.3f}"})

    return publish(subject, store, make)


def find_tools(library: Library, store: Store) -> dict[str, Compiler | Nvcc | None]:
    """Return the compilers of a library. Raises ToolMissing, with what to install."""
    if library.launcher and shutil.which(library.launcher[0]) is None:
        raise ToolMissing(library.launcher[0], f"no launcher {library.launcher[0]}: install it, or leave out launcher")
    return identity.tools(library.languages, store.notes, toolchain.require_compiler, toolchain.require_cxx, toolchain.require_nvcc)


def commands_of(library: Library, tools: dict[str, Compiler | Nvcc | None], work: Path) -> BuildCommands:
    """Return the commands of a build in a folder, to which the generated files are written. They run in the current folder."""
    c, cxx, nvcc = tools.get("c"), tools.get("c++"), tools.get("cuda")
    own = work / "generated"
    for name, content in library.generated.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(content)
    include = [f"-I{folder}" for folder in ([str(own)] if library.generated else []) + [*library.include]]
    # A binary has no paths of this machine: the last map that fits counts.
    maps = [f"-ffile-prefix-map={folder}={to}" for folder, to in ((os.getcwd(), "."), *((f"{each}/", "") for each in library.include),
                                                                  (f"{library.folder}/", ""), (f"{own}/", ""))]
    archs = [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in library.archs]
    before: dict[str, list[str]] = {}
    if isinstance(c, Compiler):
        before["c"] = [c.path, "-O2", "-fPIC", *maps]
    if isinstance(cxx, Compiler):
        before["c++"] = [cxx.path, "-std=c++17", "-O2", "-fPIC", *maps]
        if isinstance(nvcc, Nvcc):
            before["cuda"] = [f"{nvcc.root}/bin/nvcc", "-ccbin", cxx.path, "-std=c++17", "-O2", *archs,
                              *nvcc_flags.for_nvcc(["-fPIC", *maps], [])]
    found = {}
    for number, source in enumerate([*library.sources, *(str(own / each) for each in library.generated)]):
        language = identity.LANGUAGES.get(os.path.splitext(source)[1])
        if language is not None:
            cuda = language == "cuda"
            flags = [f"--frandom-seed={number}", *library.given["cuda_cflags"]] if cuda else library.given["cflags"]
            found[f"{number}.o"] = (source, [*library.launcher, *before[language], *include, *flags, "-MD", "-MF", f"{work}/{number}.d",
                                             "-c", source, "-o", f"{work}/{number}.o"])
    return BuildCommands(found, _link(library, before, archs, [f"{work}/{name}" for name in found], nvcc, work))


def _link(library: Library, before: dict[str, list[str]], archs: list[str], objects: list[str], nvcc: object,
          work: Path) -> list[list[str]]:
    """Return the commands of the link: of device code first, if it is relocatable."""
    cuda, commands = list[str](), list[list[str]]()
    if isinstance(nvcc, Nvcc):
        flags = library.given["cuda_cflags"]
        cuda = [f"-L{nvcc.root}/lib64", f"-L{nvcc.root}/lib64/stubs", "-lcudart"]
        if re.search(r"(?:^| )(?:-rdc|--relocatable-device-code)[= ]true(?: |$)", " ".join(flags)):
            named = [flag for flag in nvcc_flags.joined(flags) if re.match("-gencode|--generate-code|-arch|--gpu-architecture", flag)]
            cuda = [f"{work}/device.o", f"-L{nvcc.root}/lib64", "-lcudadevrt", *cuda]
            commands.append([*before["cuda"][:3], *archs, *named, "-Xcompiler", "-fPIC", "-dlink", *objects, f"-L{nvcc.root}/lib64",
                             "-lcudadevrt", "-o", f"{work}/device.o"])
    driver = before["c++" if "c++" in before else "c"][0]
    return [*commands, [driver, "-shared", *objects, *library.given["ldflags"], *cuda, "-o", f"{work}/library.so"]]


def _run(library: Library, commands: BuildCommands, work: Path, base: Path) -> None:
    """Compile in parallel, then link. Raises CompileError with the first source's complaint."""
    def run(command: list[str]) -> str:
        progress.logger.debug("%s", " ".join(command))
        return run_tool(command, Path.cwd())

    try:
        with processes.pool(budget.jobs(budget.NVCC_JOB if "cuda" in library.languages else budget.C_JOB)) as pool:
            for each in [pool.submit(run, command) for _, command in commands.sources.values()]:
                each.result()
        for command in commands.link:
            run(command)
    except CompilerFailed as failed:
        unknown = _NO_ARCH.search(str(failed))
        if unknown is not None:
            raise UnknownArch(f"opjit.build of {library.name!r}: nvcc knows no arch {unknown[1]}; give it others, or install a newer CUDA "
                              "Toolkit") from None
        raise _diagnosed(library, str(failed).replace(f"{work}/generated/", ""), base) from None


def _diagnosed(library: Library, output: str, base: Path) -> BuildError:
    return diagnose(output, library.name, library.purpose, base / "logs")


def _headers_found(library: Library, subject: Subject, tools: dict[str, Any], work: Path, started: int) -> dict[str, str]:
    """Return the SHA-256 of the headers that only a compiler found, and that no version in the key covers."""
    read = {os.path.abspath(path) for listing in work.glob("*.d")
            for path in headers.read_dependencies(listing.read_text("utf-8", "surrogateescape"))}
    folders = [folder for tool in tools.values() for folder in ([tool.root] if isinstance(tool, Nvcc) else tool.includes.split(":"))]
    trusted = files.inside([*(folder for folder in folders if folder != "/usr/local/include"), str(work)])
    scanned = {os.path.realpath(library.place(name)) for name in library.inputs}
    found = {}
    for path in _others(read, trusted, scanned):
        if os.stat(path).st_ctime_ns >= started:
            raise subject.fault(f"{path} changed during compilation; build it again")
        found[library.portable(headers.normalized(path))] = files.digest(path)
    return found


def _others(read: Iterable[str], trusted: tuple[str, ...], scanned: set[str]) -> list[str]:
    return [path for path in sorted(read) if not os.path.realpath(path).startswith(trusted) and os.path.realpath(path) not in scanned]

"""The compilers' commands for a shared library."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from opjit import processes, progress
from opjit.builder import budget, runtime_objects
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.builder.diagnosis import diagnose
from opjit.errors import ToolMissing, UnknownArch
from opjit.recipe import headers, libraries, nvcc_flags, toolchain
from opjit.recipe.toolchain import Compiler, Nvcc
from opjit.shared_library import identity
from opjit.shared_library.content import trusted_prefixes
from opjit.shared_library.identity import Library
from opjit.shared_library.objects import KeptObjects
from opjit.shared_library.publication import Compiled, build_and_publish
from opjit.store.entry import Entry
from opjit.store.store import Store

_NO_ARCH = re.compile(r"Unsupported gpu architecture '(\w+)'")
_NEEDS = {".cu": budget.NVCC_JOB, **dict.fromkeys((".cpp", ".cc", ".cxx"), budget.CXX_JOB)}
_OF_DRIVER = re.compile(r"\bU (cu[A-Z]\w*)")
_RELOCATABLE = re.compile(r"(?:^| )(?:-rdc|--relocatable-device-code)[= ]true(?: |$)")


def build(library: Library, store: Store, must_store: bool = False) -> Entry:
    """Build a library and publish it; see `publish`. Raises what `opjit.build` raises."""
    if library.launcher and shutil.which(library.launcher[0]) is None:
        raise ToolMissing(
            library.launcher[0],
            f"no launcher {library.launcher[0]}: install it, or leave out launcher",
        )
    tools = identity.tools(library.languages, store.notes, required=True)

    def compile_in(work: Path, base: Path) -> Compiled:
        before = _compilers(library, tools, work)
        sources = _sources(library, before, work)
        trusted, made = (
            trusted_prefixes([*tools.values()], [str(work)]),
            replace(library, toolchain=identity.versions(tools)),
        )
        objects = KeptObjects(made, base, work, None, trusted)
        linker = _run(
            objects,
            sources,
            lambda: _link(library, before, [command[-1] for command in sources], tools, work),
        )
        read = {path for listing in work.glob("*.d") for path in _read(listing)}
        return Compiled(made, work / "library.so", linker, read | objects.read, trusted)

    return build_and_publish(library, store, must_store, compile_in)


def write_commands(library: Library, store: Store, place: Path) -> None:
    """Write a compile_commands.json, and the generated files beside it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    before = _compilers(
        library, identity.tools(library.languages, store.notes, required=True), place.parent
    )
    place.write_text(
        json.dumps(
            [
                {
                    "directory": os.getcwd(),
                    "file": command[-3],
                    "output": command[-1],
                    "arguments": command,
                }
                for command in _sources(library, before, place.parent)
            ],
            indent=1,
        ),
        "utf-8",
        "surrogateescape",
    )


def _compilers(
    library: Library, tools: Mapping[str, Compiler | Nvcc | None], work: Path
) -> dict[str, list[str]]:
    """Return the start of each language's commands."""
    # A binary has no paths of this machine: the last map that fits counts.
    places = [
        *((f"{folder}/", "") for folder in library.include),
        (f"{library.folder}/", ""),
        (f"{work}/generated/", ""),
    ]
    common = [
        "-fPIC",
        f"-ffile-prefix-map={os.getcwd()}=.",
        *(f"-ffile-prefix-map={folder}={name}" for folder, name in places),
    ]
    c, cxx, nvcc = tools.get("c"), tools.get("c++"), tools.get("cuda")
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
            launcher = library.launcher or toolchain.named("CC" if language == "c" else "CXX")[0]
            found.append(
                [
                    *launcher,
                    *before[language],
                    *include,
                    *flags,
                    "-MD",
                    "-MF",
                    f"{work}/{number}.d",
                    "-c",
                    source,
                    "-o",
                    f"{work}/{number}.o",
                ]
            )
    return found


def _link(
    library: Library,
    before: Mapping[str, list[str]],
    objects: list[str],
    tools: Mapping[str, Compiler | Nvcc | None],
    work: Path,
) -> list[list[str]]:
    """Return the commands of the link: of device code first, if it is relocatable."""
    cuda, commands, nvcc = list[str](), list[list[str]](), tools.get("cuda")
    if isinstance(nvcc, Nvcc):
        flags = library.given["cuda_cflags"]
        cuda = [f"-L{nvcc.root}/lib64", f"-L{nvcc.root}/lib64/stubs", "-lcudart"]
        if _RELOCATABLE.search(" ".join(flags)):
            named = [flag for flag in nvcc_flags.joined(flags) if identity.NAMES_ARCH.match(flag)]
            cuda = [f"{work}/device.o", f"-L{nvcc.root}/lib64", "-lcudadevrt", *cuda]
            commands.append(
                [
                    *before["cuda"][:3],
                    *_gencode(library),
                    *named,
                    "-Xcompiler",
                    "-fPIC",
                    "-dlink",
                    *objects,
                    f"-L{nvcc.root}/lib64",
                    "-lcudadevrt",
                    "-o",
                    f"{work}/device.o",
                ]
            )
    driver = tools.get("c++") or tools.get("c")
    assert isinstance(driver, Compiler)
    cuda.append(f"-L{_cuda_libraries(library, objects, driver, nvcc, work)}")
    return [
        *commands,
        [
            driver.path,
            "-shared",
            *objects,
            *library.given["ldflags"],
            *cuda,
            "-o",
            f"{work}/library.so",
        ],
    ]


def _cuda_libraries(
    library: Library, objects: list[str], driver: Compiler, nvcc: object, work: Path
) -> Path:
    """Make a folder of CUDA libraries for the linker, which no folder before may have: those of pip, and one with the soname of the GPU
    driver's, which only machines with a GPU have, and the functions that are called."""
    folder = work / "cuda"
    folder.mkdir()
    named = {flag[2:] for flag in library.given["ldflags"] if flag.startswith("-l")}
    runtime = f"cuda{nvcc.version.partition('.')[0]}" if isinstance(nvcc, Nvcc) else ""
    for name in named & libraries.OF_TORCH:
        found = libraries.find_cuda_library(name, runtime)
        if found is not None:
            (folder / f"lib{name}.so").symlink_to(found.path)
    if "cuda" in named:
        undefined = run_tool(["nm", "-u", *objects, *library.archives], work)
        runtime_objects.stub(
            driver, "libcuda.so.1", sorted({*_OF_DRIVER.findall(undefined)}), folder
        )
        (folder / "libcuda.so").symlink_to("libcuda.so.1")
    return folder


def _read(listing: str | Path) -> set[str]:
    return {
        os.path.abspath(path)
        for path in headers.read_dependencies(Path(listing).read_text("utf-8", "surrogateescape"))
    }


def _run(
    objects: KeptObjects, sources: list[list[str]], link: Callable[[], list[list[str]]]
) -> str:
    """Compile in parallel, then link. Returns the linker. Raises CompileError with the first source's complaint."""
    library, work = objects.content, objects.work

    def run(command: list[str]) -> str:
        progress.logger().debug("%s", " ".join(command))
        return run_tool(
            command, Path.cwd(), _NEEDS.get(os.path.splitext(command[-3])[1], budget.C_JOB)
        )

    def compile_one(command: list[str]) -> None:
        each = command[-3], shlex.join(command), Path(command[-1])
        if not objects.take(*each):
            run(command)
            objects.keep(*each, _read(command[-5]))

    try:
        with processes.pool(budget.jobs(budget.C_JOB)) as pool:
            list(pool.map(compile_one if len(sources) > 1 else run, sources))
        for command in link():
            run(command)
        return command[0]
    except CompilerFailed as failed:
        unknown = _NO_ARCH.search(str(failed))
        if unknown is not None:
            raise UnknownArch(
                f"opjit.build of {library.name!r}: nvcc knows no arch {unknown[1]}; give it others, or install a newer CUDA "
                "Toolkit"
            ) from None
        raise diagnose(
            str(failed).replace(f"{work}/generated/", ""),
            library.name,
            library.purpose,
            objects.base / "logs",
        ) from None

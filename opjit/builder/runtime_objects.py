"""The parts that every op is linked with: opjit's compiled runtime and stubs of torch's libraries, made once per compiler and flags.

    <root>/v2/parts/<key>/    opjit_runtime.o, opjit_convert.o, opjit_elementwise.o, libtorch_cpu.so, …, reads.json with the files that
                              made them, and parts.json with the SHA-256 of all

A stub is a shared library with the soname of one of torch's and empty versions of the functions in
opjit_shim.h. So the linker reports misspelled and unsupported functions, and a build does not
depend on the installed torch. (Linking against torch is 0.2 s slower.)
"""

import re
from collections.abc import Iterable
from pathlib import Path

from opjit import files, processes, resources
from opjit.backends import Flags, Shared
from opjit.builder import parts
from opjit.builder.compile_step import run_tool
from opjit.recipe.compilers import Compiler
from opjit.recipe.reads import Reads
from opjit.recipe.toolchain import identity

# Linked into every op's library.
RUNTIME = (
    "opjit_runtime.c",
    "opjit_convert.c",
    "opjit_elementwise.c",
)
OBJECTS = tuple(f"{Path(source).stem}.o" for source in RUNTIME)
_OF_CUDA = r"cuda_(stream|caching|mm|addmm)"
# Named by torch's own link flags, needed by no op.
_UNUSED = (
    "c10",
    "torch",
    "c10_cuda",
    "torch_cuda",
)

_FLAGS = ["-O1", "-ftree-vectorize", "-fPIC"]


def folder(base: Path, compiler: Compiler, flags: Flags) -> tuple[Path, Reads]:
    """Return the folder inside the store's folder with the parts for a compiler and a backend's
    flags, and the inputs of the parts.

    Raises OSError if the folder is not writable, UntrustedFolder if other users can write it,
    BuildError if the compiler failed.
    """
    include = resources.include_path()
    tools = identity(compiler)
    shim = files.digest(_shim())
    content = [include, tools, compiler.includes, flags.c, _FLAGS, flags.stubs, shim]

    def make(staged: Path) -> None:
        _make(staged, include, compiler, flags)

    place = parts.kept(base, parts.name_of(content), OBJECTS, (), make)
    return place, parts.kept_reads(place)


def _make(work: Path, include: str, compiler: Compiler, flags: Flags) -> None:
    """Make all parts.

    -O1 and side by side: 0.45 s for the first get, where -O3 and one by one take 0.9 s (tests/benchmarks/cold.py).
    Only the loops of opjit_convert.c need vectors."""

    def compile_one(source: str) -> None:
        paths = {"folder": include, "include": include, "staging": str(work)}
        options = [flag.format(**paths) for flag in flags.c]
        options += [*_FLAGS, "-c", f"-I{include}", f"{include}/{source}"]
        parts.compile_part(compiler, options, work)

    processes.in_parallel(compile_one, RUNTIME)
    for library in flags.stubs:
        stub_of_torch(library, compiler, work)
    for name in _UNUSED:
        (work / f"lib{name}.a").write_bytes(b"!<arch>\n")


def _shim() -> str:
    """The header of torch's functions, from which the stubs are made."""
    return str(resources.folder("kernels_c") / "opjit_shim.h")


def stub_of_torch(library: str, compiler: Compiler, work: Path) -> None:
    """Make a stub of one of torch's libraries, ``"libtorch_cpu"``, in a folder."""
    header = Path(_shim()).read_text("utf-8")
    declared = sorted(set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", header)))
    of_cuda = library == "libtorch_cuda"
    functions = [name for name in declared if bool(re.search(_OF_CUDA, name)) == of_cuda]
    stub(compiler, f"{library}.so", functions, work)


def stub(compiler: Compiler, soname: str, functions: Iterable[str], work: Path) -> None:
    (work / f"{soname}.c").write_text(
        "".join(f"void {function}(void) {{}}\n" for function in functions), "ascii"
    )
    parts.compile_part(
        compiler,
        ["-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", "-o", soname, f"{soname}.c"],
        work,
    )


def stubs_of(libraries: Iterable[Shared], compiler: Compiler, work: Path) -> tuple[Shared, ...]:
    """Make stubs of this machine's shared libraries for a cross compiler's machine, in a new folder."""
    work.mkdir()
    made = []
    for library in libraries:
        rows = [
            line.split()
            for line in run_tool(
                ["readelf", "--dyn-syms", "--wide", library.path], work
            ).splitlines()
        ]
        names = {
            row[7].partition("@")[0]
            for row in rows
            if len(row) == 8 and row[3] == "FUNC" and row[6] != "UND"
        }
        stub(compiler, library.soname, sorted(names), work)
        made.append(Shared(library.soname, str(work / library.soname)))
    return tuple(made)

"""From a recipe to a published entry, through torch.utils.cpp_extension.load in a private folder.

torch's loader describes the build. opjit sets the inputs of compilation and link, runs the
commands, and checks the result.
"""

import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from opjit.builder import compile_warnings, kernel_usage
from opjit.builder.kernel_usage import KernelUsage
from opjit.builder.op_library import compile_library
from opjit.builder.publish import Compiled, build_and_publish
from opjit.errors import BuildError, CompileError, ToolMissing
from opjit.recipe import libraries, reads, recorder, toolchain
from opjit.recipe.build_inputs import UNNAMEABLE
from opjit.recipe.reads import Moment, Reads, trusted_prefixes
from opjit.recipe.recipe import Recipe
from opjit.recipe.record_reader import Changed, RecordReader
from opjit.recipe.toolchain import BuildTools
from opjit.store import elf
from opjit.store.entry import Entry, check_library
from opjit.store.store import Store

# The output of a build's tools, and the files that they read.
_Said = tuple[str, Iterable[str]]


def build(
    recipe: Recipe,
    store: Store,
    must_store: bool = False,
    inspect: Callable[[Path], None] | None = None,
) -> Entry:
    """Build a recipe and publish the entry: for this process only if the store is not writable,
    unless `must_store`.

    Raises ToolMissing or CompileError, or BuildError if the tools left no valid binary or the store
    failed. `inspect` gets the folder with the object files, even if the build failed, and prevents
    the entry by raising an error.
    """
    tools = _tools(recipe, store)
    if UNNAMEABLE.search(str(recipe.folder)):
        raise recipe.fault(
            f"the path of its directory, {str(recipe.folder)!a}, has a control character or a byte that is not UTF-8, which"
            " no build file can name; rename the directory"
        )
    if recipe.doubt and must_store:
        raise recipe.fault(f"{recipe.doubt}; make it readable")
    said: _Said = ("", ())

    def compile_in(recipe: Recipe, work: Path, base: Path, started: int) -> Compiled:
        nonlocal said
        try:
            compiled, said = _compile_checked(recipe, tools, work, base, started)
        except CompileError as error:
            with suppress(Changed, OSError, BuildError):
                error.read = recipe.document(_read(recipe, tools, work, started))
            raise
        finally:
            if inspect is not None:
                inspect(work)
        return compiled

    entry = build_and_publish(recipe, store, must_store, compile_in)
    _warn(recipe, said)
    return entry


def compile_with_warnings(recipe: Recipe, store: Store) -> None:
    """Compile a recipe with -Wall and -Wextra, and give the compilers' warnings. Keeps nothing. Raises what `build` raises."""
    flags = recipe.flags
    # Before the other flags, so that the author's -Wno-... has an effect.
    for_c = ("-Wall", "-Wextra")
    for_nvcc = ("-Xcompiler", "-Wall", "-Xcompiler", "-Wextra") if flags.cuda else ()
    warning = flags._replace(c=(*for_c, *flags.c), cuda=(*for_nvcc, *flags.cuda))
    _warn(recipe, _output(replace(recipe, flags=warning), store))


def usage_of(recipe: Recipe, store: Store) -> list[KernelUsage]:
    """Compile a recipe for CUDA, and return the resource usage of its kernels.

    Keeps nothing. Raises what `build` raises.
    """
    reporting = recipe.flags._replace(cuda=(*recipe.flags.cuda, "-Xptxas=-v"))
    return kernel_usage.parse(_output(replace(recipe, flags=reporting), store)[0])


def _output(recipe: Recipe, store: Store) -> _Said:
    """Compile a recipe, return the compilers' output, and discard the binary."""
    with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
        work = Path(folder)
        library = compile_library(recipe, work, _tools(recipe, store), store.base)
        logs = work.rglob(f"*{recorder.LOG}")
        return library.output, recorder.read(logs).opened


def _warn(recipe: Recipe, said: _Said) -> None:
    """Give the compilers' warnings about the author's files."""
    output, listed = said
    read = dict.fromkeys([*recipe.sources, *map(reads.normalized, listed)])
    paths = [path for path in read if _is_authors(path, recipe)]
    names = {path: path for path in paths}
    names |= {os.path.basename(path): path for path in paths}  # NVRTC's names of files
    found = compile_warnings.find_warnings(output, names.get, recipe.sources[0])
    if recipe.target.backend.uses_nvcc:
        from opjit.builder import cuda_mistakes  # late: no op for a CPU needs it

        for path in paths:
            found += cuda_mistakes.find_mistakes(Path(path))
    compile_warnings.emit(found, recipe.source, recipe.place)


def _is_authors(path: str, recipe: Recipe) -> bool:
    """Return whether a file is the author's: below one of the author's folders of headers, or a source."""
    folders = [str(recipe.folder), *recipe.flags.include]
    return path in recipe.sources or path.startswith(tuple(f"{folder}/" for folder in folders))


def _tools(recipe: Recipe, store: Store) -> BuildTools:
    compiler = toolchain.require_compiler(store.notes, recipe.target.host)
    if compiler.machine.partition("-")[0] not in elf.MACHINES:
        raise ToolMissing(
            "cc",
            f"the C compiler's target is {compiler.machine}, but opjit builds for {' and '.join(elf.MACHINES)}; "
            "set CC to another",
        )
    target = recipe.target
    cross = toolchain.is_cross(target.host)
    if not target.backend.uses_nvcc:
        wanted = target.backend.compiler
        if wanted and cross:
            raise ToolMissing(
                wanted.command,
                f"{wanted.command} cannot build for {target.host}; build {recipe} on a machine of "
                "that kind",
            )
        own = toolchain.require_own(target.backend, wanted, store.notes) if wanted else None
        return BuildTools(compiler, own=own)
    nvrtc = toolchain.find_nvrtc(target.runtime, store.notes)
    if nvrtc is not None:
        folders = [*nvrtc.headers.split(":"), *libraries.include_folders(recipe.flags.shared)]
        nvrtc = nvrtc._replace(headers=":".join(dict.fromkeys(folders)))
    if cross and nvrtc is None:
        raise ToolMissing(
            "NVRTC",
            f"cannot cross-compile {recipe}: this needs NVRTC for {target.runtime}, because nvcc builds for this machine only; "
            f"{toolchain.install_nvrtc()}",
        )
    nvcc = None if cross else toolchain.nvcc_of(target.runtime, store.notes)
    if nvcc is None and nvrtc is None:
        other = toolchain.require_nvcc(store.notes)
        raise ToolMissing(
            "nvcc",
            f"{recipe} needs a CUDA Toolkit with the major version of torch's CUDA, but the nvcc in {other.root} is that of "
            f"CUDA {other.version}; set CUDA_HOME to another",
        )
    return BuildTools(compiler, None, nvcc, nvrtc)


def _compile_checked(
    recipe: Recipe, tools: BuildTools, work: Path, base: Path, started: int
) -> tuple[Compiled, _Said]:
    """Compile in `work`, and check the binary. Returns it, and the output of the tools."""
    library = compile_library(recipe, work, tools, base)
    made = replace(recipe, toolchain=library.toolchain)
    read = _read(made, tools, work, started)
    said = library.output, read.digests
    read = read.joined(library.parts)
    remarks = {"torch": str(torch.__version__)}
    if library.remark:
        remarks["cuda"] = library.remark

    def finish(content: bytes) -> bytes:
        finished = elf.without_run_path(content)
        check_library(finished, recipe.target, recipe.flags.link)
        return finished

    kept = [*library.generated, work / "build.ninja"]
    compiler = tools.compiler.path
    compiled = Compiled(made, library.path, compiler, read, kept, remarks, finish)
    return compiled, said


def _read(recipe: Recipe, tools: BuildTools, work: Path, started: int) -> Reads:
    """Return the reads of a build's tools. A version in the key covers the files of CUDA and of a device's SDK.

    Raises BuildError for a header of torch or Python, Changed for a file that changed.
    """
    record = recorder.read(work.rglob(f"*{recorder.LOG}"), str(work))
    _refuse_torch(recipe, record.opened)
    own = recipe.target.backend.compiler
    shared = recipe.flags.shared
    folders = [*(own.folders if own else ()), *libraries.include_folders(shared), *_of_torch()]
    folders += [*tools.folders, *(os.path.dirname(each.path) for each in shared)]
    trusted = trusted_prefixes(folders, recipe.places.system)
    reader = RecordReader(str(work), Moment(recipe.texts), trusted, started, recipe.sources)
    return reader.reads_in(record)


def _of_torch() -> list[str]:
    """The folders of torch's and Python's headers. torch's load adds them to each command, and no op may read them."""
    folders = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    return [os.path.dirname(torch.__file__), *folders]


def _refuse_torch(recipe: Recipe, read: Iterable[str]) -> None:
    """Raise BuildError for a header that would tie an op to one version of torch or Python."""
    forbidden = tuple(os.path.realpath(folder) + os.sep for folder in _of_torch())
    for path in read:
        folder, name = os.path.split(path)
        linked = os.path.join(os.path.realpath(folder), name)  # some installers link each file
        if linked.startswith(forbidden) or os.path.realpath(path).startswith(forbidden):
            raise recipe.fault(
                f"it includes {path}: an op is plain C over opjit.h; torch's and Python's headers would tie its binary to "
                "one version of them"
            )

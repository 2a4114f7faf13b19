"""From a recipe to a published entry, through torch.utils.cpp_extension.load in a private folder.

torch's loader writes the build file, runs ninja and reports errors. opjit sets what it compiles and links (see `parts`), and checks the
result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from opjit import files, processes, progress, resources
from opjit.backends import Flags
from opjit.builder import compile_warnings, device, glue, parts, torch_builder
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Subject, attempts
from opjit.errors import BuildError, EntryError, ToolMissing
from opjit.recipe import headers, libraries, toolchain
from opjit.recipe.flags import LINE_INFO, for_debugger
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import Compiler, Nvcc, Nvrtc, Own
from opjit.store import elf
from opjit.store.entry import Entry, check_library
from opjit.store.manifest import NAME, Manifest
from opjit.store.store import Store

if TYPE_CHECKING:
    from opjit.builder.kernel_usage import Usage

# In a path, torch escapes only spaces for ninja, and nvcc misreads quotes and backslashes.
_FROM_COMPILER = re.compile(r".*/cc\w+\.s|.*/tmpxft_\w+[.-]opjit_(kernel|source\d+)\..*")  # an assembler's own input
_UNWRITABLE = re.compile(r"[$:|\"`\\\x00-\x1f\x7f\ud800-\udfff]")
# No build file, and no list of what a compiler read, can name such a path; a surrogate is a byte that is not UTF-8.
_UNNAMEABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Tools(NamedTuple):
    """The tools of a build. `ninja` is the folder of its executable, `own` the device's compiler."""

    compiler: Compiler
    nvcc: Nvcc | None
    nvrtc: Nvrtc | None
    ninja: str
    own: Own | None = None


def build(recipe: Recipe, store: Store, must_store: bool = False) -> Entry:
    """Build a recipe and publish the entry. If the store is not writable, keep it for this process only.

    Args:
        must_store: raise instead of keeping it for this process only.

    Raises:
        ToolMissing: there is no compiler or no ninja.
        CompileError: the op's source does not compile or link.
        BuildError: the tools left no valid binary, or `must_store` is set and the store failed.
    """
    tools = _tools(recipe, store)
    subject = Subject(recipe.schema.qualified, str(recipe.target), recipe.target, store.folder(recipe.schema.qualified, recipe.target),
                      headers.unreadable(recipe.inputs), must_store)
    if _UNNAMEABLE.search(str(recipe.folder)):
        raise subject.fault(f"the path of its folder, {str(recipe.folder)!a}, has a control character or a byte that is not UTF-8, which"
                            " no build file can name; rename the folder")
    for attempt in attempts(subject, store):
        with attempt as staged, workspace(staged) as work:
            described, output = _make_entry(recipe, subject, tools, work, staged / "entry", attempt.base)
            if not subject.unread and recipe.inputs_now() != recipe.inputs:
                raise subject.fault("sources changed during compilation; ask for it again")
            attempt.publish(described)
    _warn(recipe, output)
    return attempt.entry


def check(recipe: Recipe, store: Store) -> None:
    """Compile a recipe with -Wall and -Wextra, and give the compilers' warnings. Keeps nothing. Raises what `build` raises."""
    flags, every = recipe.flags, ("-Wall", "-Wextra")  # before the others, so that the author's -Wno-... is heard
    for_nvcc = tuple(part for flag in every for part in ("-Xcompiler", flag)) if flags.cuda else ()
    _warn(recipe, _output(recipe._replace(flags=flags._replace(c=(*every, *flags.c), cuda=(*for_nvcc, *flags.cuda))), store))


def usage_of(recipe: Recipe, store: Store) -> list[Usage]:
    """Compile a recipe for CUDA, and return what its kernels take of a GPU. Keeps nothing. Raises what `build` raises."""
    from opjit.builder import kernel_usage

    return kernel_usage.parse(_output(recipe._replace(flags=recipe.flags._replace(cuda=(*recipe.flags.cuda, "-Xptxas=-v"))), store))


def _output(recipe: Recipe, store: Store) -> str:
    """Compile a recipe, keep nothing, and return the compilers' output."""
    with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
        work = Path(folder)
        sources = _write_glue(recipe, work)
        return _compile(recipe, f"opjit_{files.unique()}", sources, work, _tools(recipe, store), store.base).output


def _warn(recipe: Recipe, output: str) -> None:
    """Give the compilers' warnings about the author's files."""
    folder, source = str(recipe.folder), str(recipe.source)
    paths = [headers.normalized(headers.path_of(name, folder, recipe.flags.include)) for name in recipe.inputs
             if not name.startswith("<opjit>/")]
    names = {**{os.path.basename(path): path for path in paths}, **{path: path for path in paths}}  # NVRTC names a file without its folder
    compile_warnings.emit(compile_warnings.find(output, names.get, source), recipe.source, recipe.label)


def _tools(recipe: Recipe, store: Store) -> Tools:
    compiler = toolchain.require_compiler(store.notes)
    if compiler.machine.partition("-")[0] not in elf.MACHINES:
        raise ToolMissing("cc", f"the C compiler's target is {compiler.machine}, but opjit builds for {' and '.join(elf.MACHINES)}; "
                                "set CC to another")
    ninja, target = toolchain.require_ninja(), recipe.target
    if not target.backend.uses_nvcc:
        wanted = target.backend.compiler
        return Tools(compiler, None, None, ninja, toolchain.require_own(target.backend, wanted, store.notes) if wanted else None)
    nvrtc = toolchain.find_nvrtc(target.runtime, store.notes)
    if nvrtc is not None:
        folders = [*nvrtc.headers.split(":"), *libraries.include_folders(recipe.flags.shared)]
        nvrtc = nvrtc._replace(headers=":".join(dict.fromkeys(folders)))
    nvcc = toolchain.working_nvcc(store.notes) if nvrtc else toolchain.require_nvcc(store.notes)
    if nvcc is not None and target.backend.runtime(nvcc.version) != target.runtime:
        if nvrtc is None:
            raise ToolMissing("nvcc", f"{recipe} needs a CUDA Toolkit of torch's own major version, but the nvcc in {nvcc.root} is that of "
                                      f"CUDA {nvcc.version}; set CUDA_HOME to another")
        nvcc = None
    return Tools(compiler, nvcc, nvrtc, ninja)


@contextmanager
def workspace(staged: Path) -> Iterator[Path]:
    """Open the compilers' folder: in the staging folder, unless torch cannot write that path into a build file."""
    if _UNWRITABLE.search(str(staged)):
        with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
            yield Path(folder)
    else:
        work = staged / "build"
        work.mkdir(mode=0o700)
        yield work


def _write_glue(recipe: Recipe, work: Path) -> list[Path]:
    """Write an op's glue. Returns its files."""
    texts = glue.render(recipe.schema, recipe.target.backend, recipe.source.name)
    for name, text in texts.items():
        (work / name).write_text(text, encoding="utf-8")
    return [work / name for name in texts]


def _make_entry(recipe: Recipe, subject: Subject, tools: Tools, work: Path, entry: Path, base: Path) -> tuple[Manifest, str]:
    """Compile in `work`, check the binary, and write a complete entry. Returns its manifest, and the compilers' output."""
    entry.mkdir(mode=0o700)
    sources = _write_glue(recipe, work)
    started = time.perf_counter()
    progress.step("compiling")
    name = f"opjit_{files.unique()}"
    made = _compile(recipe, name, sources, work, tools, base)
    recipe = recipe._replace(toolchain=made.toolchain)
    seconds = time.perf_counter() - started
    progress.step("checking")
    content = _checked(recipe, subject, work, name, tools)
    library = f"{recipe.schema.namespace}.{recipe.schema.name}.so"
    for source in (*sources, work / "build.ninja"):
        files.write_synced(entry / source.name, source.read_bytes())
    files.write_synced(entry / library, content)
    key = recipe.key
    assert key is not None  # the toolchain is known now
    described = Manifest(key, recipe.document(), library, len(content), hashlib.sha256(content).hexdigest(),
                         {"torch": torch.__version__, "seconds": f"{seconds:.3f}", "lines": json.dumps(recipe.lines()), **made.remark})
    files.write_synced(entry / NAME, described.dump())
    return described, made.output


class _Compiled(NamedTuple):
    """A compiled library.

    Attributes:
        toolchain: the compilers' identity.
        remark: on them, for the manifest.
        output: theirs, with their warnings.
    """

    toolchain: dict[str, str]
    remark: dict[str, str]
    output: str


def _compile(recipe: Recipe, name: str, sources: list[Path], work: Path, tools: Tools, base: Path) -> _Compiled:
    """Compile and link: CUDA code with NVRTC or else nvcc, another device's with its own compiler."""
    flags = recipe.target.backend.flags(recipe.target.arch, recipe.target.runtime)
    flags = for_debugger(flags) if recipe.flags.debug else flags
    why = ""
    if tools.nvrtc is not None:
        with processes.importing:
            from opjit.builder import cuda
        try:
            with ThreadPoolExecutor(1) as pool:
                making = pool.submit(_parts, base, tools.compiler, flags, work)
                made = cuda.compile_kernels(recipe, work, tools.compiler, tools.nvrtc)
                linked = making.result()
        except cuda.Unsupported as refusal:
            why = str(refusal)
            if tools.nvcc is None:
                raise ToolMissing("nvcc", f"{recipe} needs nvcc, as {why}; install the CUDA Toolkit") from None
        except cuda.Failed as failed:
            first = next((line for line in str(failed).splitlines() if "error" in line), "no message")
            why = f"NVRTC or the C++ compiler refused it: {first}"
            if tools.nvcc is None:
                raise _diagnosed(recipe, str(failed), base) from None
        else:
            objects = [*(each for one in made for each in one.objects), *(linked / part for part in parts.OBJECTS)]
            output = _link(recipe, name, [sources[0], *(one.source for one in made)], objects, made[0].link, linked, work,
                           tools._replace(nvcc=None), base)
            made_by = toolchain.identity(tools.compiler, tools.nvrtc)
            return _Compiled(made_by, {"cuda": f"NVRTC {tools.nvrtc.version}"}, "".join([*(one.output for one in made), output]))
        progress.log(f"{recipe} is compiled by nvcc, as {why}")
    remark = {"cuda": f"nvcc {tools.nvcc.build}{f', as {why}' if why else ''}"} if tools.nvcc else {}
    if tools.nvcc and not recipe.flags.debug and LINE_INFO & {*recipe.flags.cuda}:
        remark["cuda"] += "; without line information, in which nvcc names folders of this machine"
        recipe = recipe._replace(flags=recipe.flags._replace(cuda=tuple(flag for flag in recipe.flags.cuda if flag not in LINE_INFO)))
    linked = _parts(base, tools.compiler, flags, work)
    sources = [*sources, *_including(recipe, work)]
    kernels, said = _by_own_compiler(recipe, sources[1:], work, tools.own, base) if tools.own else ([], "")
    objects = [*kernels, *(linked / part for part in parts.OBJECTS)]
    output = _link(recipe, name, sources[:1] if tools.own else sources, objects, (), linked, work, tools, base)
    return _Compiled(toolchain.identity(tools.compiler, tools.nvcc or tools.own), remark, said + output)


def _by_own_compiler(recipe: Recipe, sources: list[Path], work: Path, own: Own, base: Path) -> tuple[list[Path], str]:
    """Compile a device's kernels with its own compiler. Returns the object files, and the compiler's output."""
    try:
        return device.compile_kernels(recipe, sources, work, own)
    except device.Failed as failed:
        raise _diagnosed(recipe, str(failed), base) from None


def _parts(base: Path, compiler: Compiler, flags: Flags, work: Path) -> Path:
    """Return the folder of parts to link with, by a path that a build file can name."""
    folder = parts.folder(base, compiler, flags)
    if not _UNNAMEABLE.search(str(folder)):
        return folder
    link = work / "parts"
    link.symlink_to(folder)
    return link


def _including(recipe: Recipe, work: Path) -> list[Path]:
    """Write a file for each of the author's other sources, which includes it: files of any names and paths can be built."""
    suffix = recipe.target.backend.suffix
    made = [work / f"opjit_source{number}{suffix}" for number in range(len(recipe.flags.sources))]
    for path, source in zip(made, recipe.flags.sources, strict=True):
        path.write_text(f'#include "{os.path.relpath(source, recipe.folder)}"\n', "utf-8", "surrogateescape")
    return made


def _link(recipe: Recipe, name: str, sources: list[Path], objects: list[Path], link: Iterable[str], linked: Path, work: Path, tools: Tools,
          base: Path) -> str:
    """Compile sources with torch's builder, and link them. Returns the tools' output."""
    flags, places = recipe.flags, {**recipe.places(work), "unique": torch_builder.UNIQUE}
    stubs = [f"-l{stub.removeprefix('lib')}" for stub in flags.stubs]
    try:
        return torch_builder.build_op(name, sources, objects, {
            "include": recipe.include_path,
            "c": [compile_warnings.LARGE_FRAME, *(flag.format(**places) for flag in flags.c),
                  *toolchain.listing(tools.compiler, torch_builder.UNIQUE)],
            "cuda": [*(flag.format(**places) for flag in flags.cuda),
                     *(part for folder in libraries.include_folders(flags.shared) for part in ("-isystem", folder)),
                     *(part for flag in toolchain.listing(tools.compiler, torch_builder.UNIQUE) for part in ("-Xcompiler", flag))],
            "link": [f"-L{linked}", "-Wl,--no-as-needed", *stubs, "-Wl,--as-needed", *link, *libraries.arguments(flags),
                     *([] if flags.debug else ["-Wl,-s"])],
        }, work, tools.compiler, tools.nvcc, tools.ninja)
    except torch_builder.Failed as failed:
        raise _diagnosed(recipe, str(failed), base) from None


def _diagnosed(recipe: Recipe, output: str, base: Path) -> BuildError:
    expected = str(recipe.source), glue.prototype(recipe.schema, recipe.target.backend)
    error = diagnose(output, recipe.schema.qualified, str(recipe.target), base / "logs", expected)
    if recipe.label is not None:  # an inline source: the user does not know its path
        error.args = (str(error).replace(str(recipe.source), recipe.label),)
    return error


def _checked(recipe: Recipe, subject: Subject, work: Path, name: str, tools: Tools) -> bytes:
    """Check which files the compilers read, and what the library needs and defines. Returns its bytes."""
    read, assembled = (dict.fromkeys(path for listing in work.rglob(names)
                                     for path in headers.read_dependencies(listing.read_text("utf-8", "surrogateescape")))
                       for names in ("*.deps", f"*{toolchain.ASSEMBLED}"))
    _check_dependencies(recipe, subject, work, read, tools)
    own = files.inside([str(work)])
    taken = [path for path in assembled if not (_FROM_COMPILER.fullmatch(str(path)) or os.path.realpath(work / path).startswith(own))]
    if taken:
        raise subject.fault(f"its assembly takes in {taken[0]} with .incbin, so a change of that file would go unnoticed; put its bytes "
                            "into a header (xxd -i)")
    try:
        content = elf.without_run_path((work / name).read_bytes())
        check_library(content, recipe.target, recipe.flags.link)
    except (FileNotFoundError, EntryError) as error:
        raise subject.fault(f"{tools.compiler.path} reported success but left no valid library: {error}", tools.compiler.path) from None
    return content


def _check_dependencies(recipe: Recipe, subject: Subject, work: Path, read: Iterable[Path], tools: Tools) -> None:
    """Compare the files that the compilers read with those that the key covers: it must cover all that decide the binary."""
    include, folder, added = str(resources.folder("kernels_c")), str(recipe.folder), recipe.flags.include
    own = recipe.target.backend.compiler
    trusted = files.inside([str(work), *tools.compiler.includes.split(":"), *([tools.nvcc.root] if tools.nvcc else []),
                            *(map(os.path.realpath, own.folders) if own else ()),
                            *libraries.include_folders(recipe.flags.shared), *(tools.nvrtc.headers.split(":") if tools.nvrtc else [])])
    forbidden = files.inside([os.path.dirname(torch.__file__), sysconfig.get_path("include"), sysconfig.get_path("platinclude")])
    place = cache(os.path.realpath)  # it asks the kernel about each part of a path, and many files lie in few folders
    for path in read:
        real = os.path.join(place(os.path.join(work, path.parent)), path.name)
        real = os.path.realpath(real) if os.path.islink(real) else real
        if real.startswith(forbidden):
            raise subject.fault(f"it includes {path}: an op is plain C over opjit.h; torch's and Python's headers would tie its binary to "
                                "one version of them")
        if real.startswith(trusted):
            continue
        names = {headers.portable_name(headers.normalized(os.path.join(work, path)), folder, include, added),
                 headers.portable_name(real, os.path.realpath(folder), os.path.realpath(include), tuple(map(os.path.realpath, added)))}
        if not names & recipe.inputs.keys():
            raise subject.fault(f"it includes {path} in a way that a scan of its #include lines does not find, so a change of that "
                                "file would go unnoticed; name the file in an #include line")

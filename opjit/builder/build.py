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
from typing import NamedTuple

import torch

from opjit import files, processes, progress, resources
from opjit.builder import glue, parts, torch_builder
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Subject, attempts
from opjit.errors import CompileError, EntryError, ToolMissing
from opjit.recipe import headers, toolchain
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import Compiler, Nvcc, Nvrtc
from opjit.store import elf
from opjit.store.entry import Entry, check_library
from opjit.store.manifest import NAME, Manifest
from opjit.store.store import Store

# In a path, torch escapes only spaces for ninja, and nvcc misreads quotes and backslashes.
_UNWRITABLE = re.compile(r"[$:|\"`\\]")


class Tools(NamedTuple):
    """The tools of a build. `ninja` is the folder of its executable."""

    compiler: Compiler
    nvcc: Nvcc | None
    nvrtc: Nvrtc | None
    ninja: str


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
    for attempt in attempts(subject, store):
        with attempt as staged, workspace(staged) as work:
            described = _make_entry(recipe, subject, tools, work, staged / "entry", attempt.base)
            if not subject.unread and recipe.inputs_now() != recipe.inputs:
                raise subject.fault("sources changed during compilation; ask for it again")
            attempt.publish(described)
    return attempt.entry


def _tools(recipe: Recipe, store: Store) -> Tools:
    compiler = toolchain.require_compiler(store.notes)
    if compiler.machine.partition("-")[0] not in elf.MACHINES:
        raise ToolMissing("cc", f"the C compiler's target is {compiler.machine}, but opjit builds for {' and '.join(elf.MACHINES)}; "
                                "set CC to another")
    ninja, target = toolchain.require_ninja(), recipe.target
    if not target.backend.uses_nvcc:
        return Tools(compiler, None, None, ninja)
    nvrtc = toolchain.find_nvrtc(target.runtime, store.notes)
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


def _make_entry(recipe: Recipe, subject: Subject, tools: Tools, work: Path, entry: Path, base: Path) -> Manifest:
    """Compile in `work`, check the binary, and write a complete entry."""
    entry.mkdir(mode=0o700)
    backend = recipe.target.backend
    sources = glue.render(recipe.schema, backend.name, backend.dispatch_key, recipe.source.name, backend.stream)
    for name, text in sources.items():
        (work / name).write_text(text, encoding="utf-8")
    started = time.perf_counter()
    progress.step("compiling")
    name = f"opjit_{files.unique()}"
    made_by, remark = _compile(recipe, name, [work / source for source in sources], work, tools, base)
    recipe = recipe._replace(toolchain=made_by)
    seconds = time.perf_counter() - started
    progress.step("checking")
    content = _checked(recipe, subject, work, name, tools)
    library = f"{recipe.schema.namespace}.{recipe.schema.name}.so"
    for source, text in sources.items():
        files.write_synced(entry / source, text.encode())
    files.write_synced(entry / "build.ninja", (work / "build.ninja").read_bytes())
    files.write_synced(entry / library, content)
    key = recipe.key
    assert key is not None  # the toolchain is known now
    described = Manifest(key, recipe.document(), library, len(content), hashlib.sha256(content).hexdigest(),
                         {"torch": torch.__version__, "seconds": f"{seconds:.3f}", "lines": json.dumps(recipe.lines()), **remark})
    files.write_synced(entry / NAME, described.dump())
    return described


def _compile(recipe: Recipe, name: str, sources: list[Path], work: Path, tools: Tools,
             base: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Compile and link, CUDA code with NVRTC or else nvcc. Returns the compilers' identity, and a remark on them for the manifest."""
    flags = recipe.target.backend.flags(recipe.target.arch, recipe.target.runtime)
    why = ""
    if tools.nvrtc is not None:
        with processes.importing:
            from opjit.builder import cuda
        try:
            with ThreadPoolExecutor(1) as pool:
                making = pool.submit(parts.folder, base, tools.compiler, flags)
                made = cuda.compile_kernel(recipe, work / "opjit_kernel.cu", work, tools.compiler, tools.nvrtc)
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
            _link(recipe, name, [sources[0], made.source], [*made.objects, *(linked / part for part in parts.OBJECTS)], made.link, linked,
                  work, tools._replace(nvcc=None), base)
            return toolchain.identity(tools.compiler, tools.nvrtc), {"cuda": f"NVRTC {tools.nvrtc.version}"}
        progress.log(f"{recipe} is compiled by nvcc, as {why}")
    linked = parts.folder(base, tools.compiler, flags)
    _link(recipe, name, sources, [linked / part for part in parts.OBJECTS], (), linked, work, tools, base)
    remark = {"cuda": f"nvcc {tools.nvcc.build}{f', as {why}' if why else ''}"} if tools.nvcc else {}
    return toolchain.identity(tools.compiler, tools.nvcc), remark


def _link(recipe: Recipe, name: str, sources: list[Path], objects: list[Path], link: Iterable[str], linked: Path, work: Path, tools: Tools,
          base: Path) -> None:
    """Compile sources with torch's builder, and link them."""
    flags = recipe.flags
    include = [str(recipe.folder), str(resources.folder("kernels_c")), *flags.include]
    places = {"folder": include[0], "include": include[1], "staging": str(work), "unique": torch_builder.UNIQUE,
              **{f"added{index}": path for index, path in enumerate(flags.include)}}
    libraries = [f"-l{stub.removeprefix('lib')}" for stub in flags.stubs]
    try:
        torch_builder.build_op(name, sources, objects, {
            "include": include,
            "c": [flag.format(**places) for flag in flags.c],
            "cuda": [flag.format(**places) for flag in flags.cuda],
            "link": [f"-L{linked}", "-Wl,--no-as-needed", *libraries, "-Wl,--as-needed", *link, *flags.link],
        }, work, tools.compiler, tools.nvcc, tools.ninja)
    except torch_builder.Failed as failed:
        raise _diagnosed(recipe, str(failed), base) from None


def _diagnosed(recipe: Recipe, output: str, base: Path) -> CompileError:
    backend = recipe.target.backend
    expected = str(recipe.source), glue.prototype(recipe.schema, backend.name, backend.stream)
    error = diagnose(output, recipe.schema.qualified, str(recipe.target), base / "logs", expected)
    if recipe.label is not None:  # an inline source: the user does not know its path
        error.args = (str(error).replace(str(recipe.source), recipe.label),)
    return error


def _checked(recipe: Recipe, subject: Subject, work: Path, name: str, tools: Tools) -> bytes:
    """Check which files the compilers read, and what the library needs and defines. Returns its bytes."""
    read = dict.fromkeys(path for listing in work.glob("*.deps")
                         for path in headers.read_dependencies(listing.read_text("utf-8", "surrogateescape")))
    _check_dependencies(recipe, subject, work, read, tools)
    try:
        content = (work / name).read_bytes()
        check_library(content, recipe.target, recipe.flags.link)
    except (FileNotFoundError, EntryError) as error:
        raise subject.fault(f"{tools.compiler.path} reported success but left no valid library: {error}", tools.compiler.path) from None
    return content


def _check_dependencies(recipe: Recipe, subject: Subject, work: Path, read: Iterable[Path], tools: Tools) -> None:
    """Compare the files that the compilers read with those that the key covers: it must cover all that decide the binary."""
    include, folder, added = str(resources.folder("kernels_c")), str(recipe.folder), recipe.flags.include
    trusted = files.inside([str(work), *tools.compiler.includes.split(":"), *([tools.nvcc.root] if tools.nvcc else []),
                            *(tools.nvrtc.headers.split(":") if tools.nvrtc else [])])
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
        if not any(name.startswith("<opjit>/") for name in names) and b".incbin" in Path(real).read_bytes():
            raise subject.fault(f"{path} includes a file with .incbin, which no compiler reports, so a change of that file would go "
                                "unnoticed; put its bytes into a header (xxd -i)")

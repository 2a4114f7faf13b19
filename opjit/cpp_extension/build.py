"""Builds an extension with torch.utils.cpp_extension in a private folder, and publishes the entry.

torch gets the caller's arguments and runs its usual commands, but it builds in that folder and loads nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from opjit import files, processes, progress
from opjit.builder import torch_builder
from opjit.builder.build import workspace
from opjit.builder.compile_step import BuildTools, by_nvrtc_or_nvcc
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Subject, publish, write_entry
from opjit.cpp_extension import identity, light, objects, static_init
from opjit.cpp_extension.identity import Extension
from opjit.errors import BuildError, CompileWarning, EntryError
from opjit.recipe import headers, toolchain
from opjit.recipe.toolchain import Compiler, Nvrtc
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store

_INLINE = ("main.cpp", "cuda.cu")  # as torch names them
_RELATIVE = re.compile(r"(?<!\S)-L(?=[\w.])")  # the start of a relative folder of libraries


def build(extension: Extension, arguments: Mapping[str, Any], store: Store, must_store: bool = False) -> Entry:
    """Build an extension and publish it in the store or, if the store cannot be written, for this process only.

    Raises:
        ToolMissing: there is no compiler or no ninja.
        CompileError: a source does not compile or link.
        BuildError: the tools left no valid binary, or a source changed during the build.
        LoadError: opening the library would end the process.
    """
    tools = _tools(extension, store)
    extension = extension._replace(toolchain=identity.compiler_identity(tools.compiler, tools.nvccs, tools.nvcc))
    subject = Subject(extension.name, extension.purpose, None, extension.entries_folder(store), headers.unreadable(extension.inputs),
                      must_store)
    def make(staged: Path, base: Path) -> Manifest:
        with workspace(staged) as work:
            shared = store if base == store.base else None
            return _make_entry(extension, arguments, subject, tools, work, staged / "entry", base, shared)

    return publish(subject, store, make)


def _tools(extension: Extension, store: Store) -> BuildTools:
    cxx = toolchain.require_cxx(store.notes)
    if extension.archs is None:
        return BuildTools(cxx, None, None, toolchain.require_ninja())
    nvrtc = identity.find_nvrtc(store.notes) if extension.light else None
    nvcc = toolchain.find_nvcc(store.notes) if nvrtc else toolchain.require_nvcc(store.notes)
    return BuildTools(cxx, nvcc, nvrtc, toolchain.require_ninja(), nvccs=toolchain.find_compiler(store.notes))


def _make_entry(extension: Extension, arguments: Mapping[str, Any], subject: Subject, tools: BuildTools, work: Path, entry: Path,
                base: Path, shared: Store | None) -> Manifest:
    """Compile in `work`, check the binary, and write a complete entry. `shared` has the objects of other builds."""
    started = time.time_ns()
    progress.step("compiling")
    with_headers = f"torch's own headers: {extension.reason}"
    if extension.light:
        arguments, with_headers = _with_light(extension, arguments, tools, work, base)
    progress.log(f"{extension.name} is built with {with_headers}")
    by_nvrtc, remark = _compile_all(extension, arguments, tools, work, base, shared, started)
    if by_nvrtc is not None:
        extension = extension._replace(toolchain=by_nvrtc)
    seconds = (time.time_ns() - started) / 1e9
    progress.step("checking")
    document = {**extension.document(), "found": _compiler_headers(extension, subject, tools, work, started)}
    if not subject.unread and extension.inputs_now() != extension.inputs:
        raise subject.fault("sources changed during compilation; load it again")
    try:
        content = (work / (extension.name if extension.program else f"{extension.name}.so")).read_bytes()
        if extension.program:
            elf.machine(content)
        else:
            _check_runtime(extension, tools.compiler, elf.inspect(content).needed, content)
    except (FileNotFoundError, EntryError) as error:
        raise subject.fault(f"{tools.compiler.path} reported success but left no valid binary: {error}", tools.compiler.path) from None
    others = [work / name for name in ("build.ninja", *_INLINE) if (work / name).is_file()]
    manifest = write_entry(entry, extension.file_name, content, others, document, {
        "seconds": f"{seconds:.3f}", "headers": f"{with_headers}; {remark}" if remark else with_headers},
                           mode=0o755 if extension.program else None)
    if not extension.program:  # before publication, as other processes do not check again
        static_init.check_in_child(str(entry / extension.file_name), extension.name, must_open=bool(extension.light))
    return manifest


def _with_light(extension: Extension, arguments: Mapping[str, Any], tools: BuildTools, work: Path,
                base: Path) -> tuple[dict[str, Any], str]:
    """Return the arguments with light headers and what they are linked with, and a note."""
    implicit = not extension.sources and not arguments.get("no_implicit_headers")
    prepared = light.prepare(extension, implicit, work / "light", base, tools.compiler)
    objects = map(torch_builder.quote, prepared.objects)
    return {**arguments, "extra_include_paths": [*prepared.folders, *(arguments["extra_include_paths"] or ())],
            "extra_ldflags": [*objects, *(arguments["extra_ldflags"] or ())]}, prepared.note


def _check_runtime(extension: Extension, cxx: Compiler, needed: frozenset[str], content: bytes) -> None:
    """Warn of a library with a C++ library of its own: it crashes when it formats a number, as two sets of locales share their indices."""
    shared = any(name.startswith(("libstdc++.", "libc++.")) for name in needed)
    if not shared and b"\0_ZNSt6locale7classicEv\0" in content:
        warnings.warn(CompileWarning(f"{extension.name} holds a second C++ library, as {cxx.path} or a flag links it statically; that "
                                     "crashes when a number becomes text, such as in TORCH_CHECK. Name another compiler in CXX"),
                      stacklevel=2)


def _compile_all(extension: Extension, arguments: Mapping[str, Any], tools: BuildTools, work: Path, base: Path, shared: Store | None,
                 started: int) -> tuple[Mapping[str, str] | None, str]:
    """Compile and link. Returns the compilers' identity if NVRTC is among them, and a remark on that."""
    if tools.nvrtc is None:
        compilers = {"compile": tools.compiler.path}
        if tools.nvcc and "PYTORCH_NVCC" not in os.environ:  # which names another program
            compilers["cuda_compile"] = f"{tools.nvcc.root}/bin/nvcc"
        kept = nullcontext() if extension.light else objects.reused(extension, compilers, _trusted(extension, tools, work), work, shared,
                                                                     started)
        _compile(extension, arguments, tools, work, base, kept)
        return None, ""

    def by_nvrtc(nvrtc: Nvrtc) -> Mapping[str, str]:
        from opjit.cpp_extension import cuda

        _compile(extension, arguments, tools, work, base, cuda.compiled(extension, work, tools.compiler, nvrtc, tools.ninja))
        return identity.compiler_identity(tools.compiler, None, nvrtc)

    def by_nvcc() -> None:
        _compile(extension, arguments, tools, work, base, nullcontext())

    return by_nvrtc_or_nvcc(extension.name, tools, by_nvrtc, by_nvcc, lambda output: _diagnosed(extension, output, work, base))


def _compile(extension: Extension, arguments: Mapping[str, Any], tools: BuildTools, work: Path, base: Path,
             around: AbstractContextManager[None]) -> None:
    passed: dict[str, Any] = {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in arguments.items()}
    passed |= {"name": extension.name, "build_directory": str(work)}
    if extension.sources:
        passed["sources"] = list(extension.sources)  # in the key's order, which decides that of static initialisers
    else:  # messages and __FILE__ shall name main.cpp and cuda.cu without this temporary folder
        names = f"-ffile-prefix-map={work}/="
        passed["extra_cflags"] = [torch_builder.quote(names), *(passed["extra_cflags"] or ())]
        passed["extra_cuda_cflags"] = [*map(torch_builder.quote, torch_builder.for_nvcc((), ["-Xcompiler", names])),
                                       *(passed["extra_cuda_cflags"] or ())]
        passed["use_pch"] = False
        passed["extra_include_paths"] = [*(passed["extra_include_paths"] or ()), *identity.header_folder(arguments, extension.texts)]
    if arguments["build_directory"]:  # torch links there, so that is what relative folders of libraries mean
        directory = shlex.quote(os.path.abspath(arguments["build_directory"])).replace("$", "$$")
        passed["extra_ldflags"] = [_RELATIVE.sub(lambda _: f"-L{directory}/", flag) for flag in passed["extra_ldflags"] or ()]
    environment = {"LC_ALL": "C", **({"TORCH_CUDA_ARCH_LIST": extension.archs} if extension.archs else {})}
    # torch's guess is wrong if nvcc is a wrapper script
    variables = torch_builder.settings()
    if tools.nvcc is not None:
        variables["CUDA_HOME"] = tools.nvcc.root
    elif tools.nvrtc is not None:
        variables["CUDA_HOME"] = tools.nvrtc.as_toolkit(work)
    try:
        torch_builder.call("load" if extension.sources else "load_inline", passed, tools.ninja, environment, variables, around)
    except torch_builder.NinjaFailed as failed:
        raise _diagnosed(extension, objects.as_torch(str(failed)), work, base) from None


def _diagnosed(extension: Extension, output: str, work: Path, base: Path) -> BuildError:
    if not extension.sources:  # flags for this change the binary only, not the compilers' messages
        output = output.replace(f"{work}{os.sep}", "")
    return _blame_name(diagnose(output, extension.name, extension.purpose, base / "logs"), extension.name, output)


def _blame_name(error: BuildError, name: str, output: str) -> BuildError:
    """Explain errors that come from the extension's name, which is a macro on the command line that no compiler's message mentions."""
    if not name.isidentifier() and re.search("(?<!-D)TORCH_EXTENSION_NAME", output):
        better = re.sub(r"\W|^(?=\d)", "_", name)
        error.args = (f"the name {name!r} becomes TORCH_EXTENSION_NAME, which must be a C++ identifier; use {better}\n{error}",)
    return error


def _trusted(extension: Extension, tools: BuildTools, work: Path) -> tuple[str, ...]:
    own = [str(light.headers.OWN)] if extension.light else []
    pythons = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    return identity.trusted_prefixes(tools.compiler, tools.nvcc, tools.nvrtc, [*pythons, str(work), *own])


def _compiler_headers(extension: Extension, subject: Subject, tools: BuildTools, work: Path, started: int) -> dict[str, str]:
    """The SHA-256 of the headers that only the compiler found."""
    done = processes.run([os.path.join(tools.ninja, "ninja"), "-t", "deps"], cwd=work, stdout=subprocess.PIPE)
    read = {os.path.join(work, os.fsdecode(line.strip())) for line in done.stdout.splitlines() if line.startswith(b"    ")}
    if tools.nvrtc is not None:
        from opjit.cpp_extension import cuda

        read |= cuda.headers_read(work)
    found = {}
    for name, path in extension.other_headers(read, _trusted(extension, tools, work)).items():
        if os.stat(path).st_ctime_ns >= started:  # the time of modification may lie in the future
            raise subject.fault(f"{path} changed during compilation; load it again")
        found[name] = files.digest(path)
    return found

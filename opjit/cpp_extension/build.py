"""Builds an extension with torch.utils.cpp_extension in a private folder, and publishes the entry.

torch gets the caller's arguments and runs its usual commands, but it builds in that folder and loads nothing.
"""

from __future__ import annotations

import hashlib
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
from typing import Any, NamedTuple

import torch

from opjit import files, processes, progress
from opjit.builder import torch_builder
from opjit.builder.build import workspace
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Subject, attempts
from opjit.cpp_extension import facade, identity, objects, static_init, vocabulary
from opjit.cpp_extension.identity import Extension
from opjit.errors import BuildError, CompileWarning, EntryError, ToolMissing
from opjit.recipe import headers, toolchain
from opjit.recipe.recipe import document_key
from opjit.recipe.toolchain import Compiler, Nvcc, Nvrtc
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.manifest import NAME, Manifest
from opjit.store.store import Store

_INLINE = ("main.cpp", "cuda.cu")  # as torch names them
_RELATIVE = re.compile(r"(?<!\S)-L(?=[\w.])")  # the start of a relative folder of libraries


class _Tools(NamedTuple):
    cxx: Compiler
    compiler: Compiler | None
    nvcc: Nvcc | None
    nvrtc: Nvrtc | None
    ninja: str


def build(extension: Extension, arguments: Mapping[str, Any], store: Store, must_store: bool = False) -> Entry:
    """Build an extension and publish it in the store or, if the store cannot be written, for this process only.

    Raises:
        ToolMissing: there is no compiler or no ninja.
        CompileError: a source does not compile or link.
        BuildError: the tools left no valid binary, or a source changed during the build.
        LoadError: opening the library would end the process.
    """
    tools = _tools(extension, store)
    extension = extension._replace(toolchain=identity.compiler_identity(tools.cxx, tools.compiler, tools.nvcc))
    subject = Subject(extension.name, extension.purpose, None, extension.shelf(store), headers.unreadable(extension.inputs),
                      must_store)
    for attempt in attempts(subject, store):
        with attempt as staged, workspace(staged) as work:
            shared = store if attempt.base == store.base else None
            attempt.publish(_make_entry(extension, arguments, subject, tools, work, staged / "entry", attempt.base, shared))
    return attempt.entry


def _tools(extension: Extension, store: Store) -> _Tools:
    cxx = toolchain.require_cxx(store.notes)
    if extension.archs is None:
        return _Tools(cxx, None, None, None, toolchain.require_ninja())
    nvrtc = identity.find_nvrtc(store.notes) if extension.facade else None
    nvcc = toolchain.find_nvcc(store.notes) if nvrtc else toolchain.require_nvcc(store.notes)
    return _Tools(cxx, toolchain.find_compiler(store.notes), nvcc, nvrtc, toolchain.require_ninja())


def _make_entry(extension: Extension, arguments: Mapping[str, Any], subject: Subject, tools: _Tools, work: Path, entry: Path,
                base: Path, shared: Store | None) -> Manifest:
    """Compile in `work`, check the binary, and write a complete entry. `shared` has the objects of other builds."""
    entry.mkdir(mode=0o700)
    started = time.time_ns()
    progress.step("compiling")
    with_headers = "light headers" if extension.facade else f"torch's own headers: {extension.reason}"
    progress.log(f"{extension.name} is built with {with_headers}")
    trusted = _trusted(extension, tools, work)
    if tools.nvrtc is None:
        compilers = {"compile": tools.cxx.path}
        if tools.nvcc and "PYTORCH_NVCC" not in os.environ:  # which names another program
            compilers["cuda_compile"] = f"{tools.nvcc.root}/bin/nvcc"
        kept = nullcontext() if extension.facade else objects.reused(extension, compilers, trusted, work, shared, started)
        _compile(extension, arguments, tools, work, base, kept)
    else:
        made_by, remark = _compile_without_nvcc(extension, arguments, tools, work, base)
        extension, with_headers = extension._replace(toolchain=made_by), f"{with_headers}; {remark}"
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
            _check_runtime(extension, tools.cxx, content)
    except (FileNotFoundError, EntryError) as error:
        raise subject.fault(f"{tools.cxx.path} reported success but left no valid binary: {error}", tools.cxx.path) from None
    for name in ("build.ninja", *_INLINE):
        if (work / name).is_file():
            files.write_synced(entry / name, (work / name).read_bytes())
    library = entry / extension.file_name
    files.write_synced(library, content)
    if extension.program:
        library.chmod(0o755)
    described = Manifest(document_key(document), document, extension.file_name, len(content), hashlib.sha256(content).hexdigest(),
                         {"torch": torch.__version__, "seconds": f"{seconds:.3f}", "headers": with_headers})
    files.write_synced(entry / NAME, described.dump())
    if not extension.program:  # before publication, as other processes do not check again
        static_init.check_in_child(str(library), extension.name, must_open=bool(extension.facade))
    return described


def _check_runtime(extension: Extension, cxx: Compiler, content: bytes) -> None:
    """Warn of a library with a C++ library of its own: it crashes when it formats a number, as two sets of locales share their indices."""
    shared = any(name.startswith(("libstdc++.", "libc++.")) for name in elf.inspect(content).needed)
    if not shared and b"\0_ZNSt6locale7classicEv\0" in content:
        warnings.warn(CompileWarning(f"{extension.name} holds a second C++ library, as {cxx.path} or a flag links it statically; that "
                                     "crashes when a number becomes text, such as in TORCH_CHECK. Name another compiler in CXX"),
                      stacklevel=2)


def _compile_without_nvcc(extension: Extension, arguments: Mapping[str, Any], tools: _Tools, work: Path,
                          base: Path) -> tuple[Mapping[str, str] | None, str]:
    """Compile CUDA code with NVRTC, or else with nvcc. Returns the compilers' identity, and a remark on them."""
    from opjit.cpp_extension import cuda

    assert tools.nvrtc is not None
    try:
        _compile(extension, arguments, tools, work, base, cuda.compiled(extension, work, tools.cxx, tools.nvrtc, tools.ninja))
        return identity.compiler_identity(tools.cxx, None, tools.nvrtc), f"NVRTC {tools.nvrtc.version}"
    except cuda.Unsupported as refusal:
        why = str(refusal)
    except cuda.Failed as failed:
        if tools.nvcc is None:
            raise _diagnosed(extension, str(failed), work, base) from None
        why = next((line.strip() for line in str(failed).splitlines() if "error" in line), "no message")
    if tools.nvcc is None:
        raise ToolMissing("nvcc", f"{extension.name} needs nvcc, as {why}; install the CUDA Toolkit")
    progress.log(f"{extension.name} is compiled by nvcc, as {why}")
    _compile(extension, arguments, tools, work, base, nullcontext())
    return extension.toolchain, f"nvcc {tools.nvcc.build}, as {why}"


def _compile(extension: Extension, arguments: Mapping[str, Any], tools: _Tools, work: Path, base: Path,
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
    if extension.facade:
        light = facade.write(vocabulary.texts(extension), work / "facade")
        passed["extra_include_paths"] = [*light, *(passed["extra_include_paths"] or ())]
        passed["extra_ldflags"] = [torch_builder.quote(str(facade.runtime(base, tools.cxx))), *(passed["extra_ldflags"] or ())]
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
    except torch_builder.Failed as failed:
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


def _trusted(extension: Extension, tools: _Tools, work: Path) -> tuple[str, ...]:
    own = [str(facade.HEADERS)] if extension.facade else []
    pythons = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    return identity.trusted_prefixes(tools.cxx, tools.nvcc, tools.nvrtc, [*pythons, str(work), *own])


def _compiler_headers(extension: Extension, subject: Subject, tools: _Tools, work: Path, started: int) -> dict[str, str]:
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

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
from typing import Any, NamedTuple

import torch

from opjit import files, processes, progress
from opjit.builder import torch_builder
from opjit.builder.compile_step import BuildTools, CompilerFailed, by_nvrtc_or_nvcc, workspace
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Subject, publish, write_entry
from opjit.cpp_extension import identity, light, static_init
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import mistakes
from opjit.errors import BuildError, CompileWarning, EntryError, LoadError
from opjit.recipe import headers, nvcc_flags, toolchain
from opjit.recipe.toolchain import Compiler, Nvrtc
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store

_RELATIVE = re.compile(r"(?<!\S)-L(?=[\w.])")  # the start of a relative folder of libraries


def build(extension: Extension, call: LoadCall | InlineCall, store: Store, must_store: bool = False) -> Entry:
    """Build an extension and publish it in the store or, if the store cannot be written, for this process only.

    Raises:
        ToolMissing: there is no compiler or no ninja.
        CompileError: a source does not compile or link.
        BuildError: the tools left no valid binary, or a source changed during the build.
        LoadError: opening the library would end the process.
        light.MayLack: the extension is to be built with light headers, and torch/extension.h may help.
    """
    tools = _tools(extension, store)
    extension = extension._replace(toolchain=identity.compiler_identity(tools.compiler, tools.nvccs, tools.nvcc))
    subject = Subject(extension.name, extension.purpose, None, store.base / extension.place_of_entries,
                      headers.unreadable(extension.inputs), must_store)

    def make(staged: Path, base: Path) -> Manifest:
        with workspace(staged) as work:
            started = time.time_ns()
            progress.step("compiling")
            prepared = light.prepare(extension, call.implicit, work, base, tools.compiler) if extension.light else None
            return _ExtensionBuild(extension, call, subject, tools, work, base, started, prepared).entry(staged / "entry")

    return publish(subject, store, make)


def _tools(extension: Extension, store: Store) -> BuildTools:
    cxx = toolchain.require_cxx(store.notes)
    if extension.archs is None:
        return BuildTools(cxx, None, None, toolchain.require_ninja())
    nvrtc = identity.find_nvrtc(store.notes) if extension.light else None
    nvcc = toolchain.find_nvcc(store.notes) if nvrtc else toolchain.require_nvcc(store.notes)
    return BuildTools(cxx, nvcc, nvrtc, toolchain.require_ninja(), nvccs=toolchain.find_compiler(store.notes))


class _ExtensionBuild(NamedTuple):
    """A build in a private folder.

    Attributes:
        work: the folder.
        base: folder of the store.
        started: time.time_ns() before a file was read.
        prepared: light headers; None for torch/extension.h.
    """

    extension: Extension
    call: LoadCall | InlineCall
    subject: Subject
    tools: BuildTools
    work: Path
    base: Path
    started: int
    prepared: light.Prepared | None

    def entry(self, entry: Path) -> Manifest:
        """Compile, check the binary, and write a complete entry."""
        extension, work = self.extension, self.work
        with_headers = self.prepared.note if self.prepared else f"torch's own headers: {extension.reason}"
        progress.log(f"{extension.name} is built with {with_headers}")
        by_nvrtc, remark = self.compile_all()
        if by_nvrtc is not None:
            extension = extension._replace(toolchain=by_nvrtc)
        seconds = (time.time_ns() - self.started) / 1e9
        progress.step("checking")
        document = {**extension.document(), "found": self.compiler_headers()}
        if not self.subject.unread and extension.inputs_now() != extension.inputs:
            raise self.subject.fault("sources changed during compilation; load it again")
        content = self.binary()
        others = [work / name for name in ("build.ninja", *light.INLINE) if (work / name).is_file()]
        manifest = write_entry(entry, extension.file_name, content, others, document, {
            "torch": torch.__version__, "seconds": f"{seconds:.3f}", "headers": f"{with_headers}; {remark}" if remark else with_headers},
                               mode=0o755 if extension.program else None)
        if not extension.program:  # before publication, as other processes do not check again
            opens = static_init.check_in_child(str(entry / extension.file_name), extension.name)
            if self.prepared and not opens:
                raise light.MayLack(LoadError(f"{extension.name} does not open: a function is missing in torch's libraries"))
        return manifest

    def binary(self) -> bytes:
        """Return the binary's content, which is valid."""
        extension, compiler = self.extension, self.tools.compiler
        try:
            content = (self.work / (extension.name if extension.program else f"{extension.name}.so")).read_bytes()
            if extension.program:
                elf.machine(content)
            else:
                _check_runtime(extension, compiler, elf.inspect(content).needed, content)
        except (FileNotFoundError, EntryError) as error:
            raise self.subject.fault(f"{compiler.path} reported success but left no valid binary: {error}", compiler.path) from None
        return content

    def compile_all(self) -> tuple[Mapping[str, str] | None, str]:
        """Compile and link. Returns the compilers' identity if NVRTC is among them, and a remark on that."""
        tools, extension = self.tools, self.extension
        if tools.nvrtc is None:
            self.compile(nullcontext())
            return None, ""

        def by_nvrtc(nvrtc: Nvrtc) -> Mapping[str, str]:
            from opjit.cpp_extension import cuda

            try:
                self.compile(cuda.compiled(extension, self.work, tools.compiler, nvrtc, tools.ninja))
            except CompilerFailed as failed:
                folders = (*nvrtc.headers.split(":"), *([f"{tools.nvcc.root}/include"] if tools.nvcc else ()))
                if self.is_final(str(failed), folders):
                    raise self.diagnosed(str(failed)) from None
                raise
            return identity.compiler_identity(tools.compiler, None, nvrtc)

        def by_nvcc() -> None:
            self.compile(nullcontext())

        return by_nvrtc_or_nvcc(extension.name, tools, by_nvrtc, by_nvcc, self.diagnosed)

    def compile(self, around: AbstractContextManager[None]) -> None:
        """Have torch write the build file, and ninja run in a block."""
        environment = {"LC_ALL": "C", **({"TORCH_CUDA_ARCH_LIST": self.extension.archs} if self.extension.archs else {})}
        variables = torch_builder.settings()  # torch's guess of CUDA_HOME is wrong if nvcc is a wrapper script
        if self.tools.nvcc is not None:
            variables["CUDA_HOME"] = self.tools.nvcc.root
        elif self.tools.nvrtc is not None:
            variables["CUDA_HOME"] = self.tools.nvrtc.as_toolkit(self.work)
        try:
            torch_builder.call(self.call.function, self.arguments(), self.tools.ninja, environment, variables, around)
        except torch_builder.NinjaFailed as failed:
            output = str(failed)
            error = self.diagnosed(output)
            raise error if self.prepared is None or self.is_final(output) else light.MayLack(error) from None

    def arguments(self) -> dict[str, Any]:
        """Return those that torch gets."""
        passed = {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in self.call.for_torch().items()}
        include, link = passed["extra_include_paths"] or [], passed["extra_ldflags"] or []
        if self.prepared:
            include = [*self.prepared.attempt.folders, *include]
            link = [*map(torch_builder.quote, self.prepared.objects), *link]
        if self.tools.nvcc is not None:
            include = [*include, toolchain.lacking(self.tools.nvcc, self.work / "lacking")]
        if self.extension.sources:
            passed["sources"] = list(self.extension.sources)  # in the key's order, which decides that of static initialisers
        else:  # messages and __FILE__ shall name main.cpp and cuda.cu without this temporary folder
            names = f"-ffile-prefix-map={self.work}/="
            passed["extra_cflags"] = [torch_builder.quote(names), *(passed["extra_cflags"] or ())]
            passed["extra_cuda_cflags"] = [*map(torch_builder.quote, nvcc_flags.for_nvcc((), ["-Xcompiler", names])),
                                           *(passed["extra_cuda_cflags"] or ())]
            passed["use_pch"] = False
            include = [*include, *identity.header_folder(self.call, self.extension.texts)]
        if self.call.build_directory:  # torch links there, so that is what relative folders of libraries mean
            directory = shlex.quote(os.path.abspath(self.call.build_directory)).replace("$", "$$")
            link = [_RELATIVE.sub(lambda _: f"-L{directory}/", flag) for flag in link]
        return {**passed, "name": self.extension.name, "build_directory": str(self.work), "extra_include_paths": include,
                "extra_ldflags": link}

    def is_final(self, output: str, cuda: tuple[str, ...] = ()) -> bool:
        """Whether the first error in a compiler's output is there with torch/extension.h, too."""
        return self.prepared is not None and mistakes.is_final(output, self.prepared.attempt._replace(cuda=cuda), self.work)

    def diagnosed(self, output: str) -> BuildError:
        """Make the error of a compiler's output."""
        extension = self.extension
        if not extension.sources:  # flags for this change the binary only, not the compilers' messages
            output = output.replace(f"{self.work}{os.sep}", "")
        return _blame_name(diagnose(output, extension.name, extension.purpose, self.base / "logs"), extension.name, output)

    def trusted(self) -> tuple[str, ...]:
        """Return the prefixes of headers that a version in the key covers."""
        own = [str(light.headers.OWN)] if self.prepared else []
        pythons = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
        return identity.trusted_prefixes(self.tools.compiler, self.tools.nvcc, self.tools.nvrtc, [*pythons, str(self.work), *own])

    def compiler_headers(self) -> dict[str, str]:
        """Return the SHA-256 of the headers that only the compiler found."""
        done = processes.run([os.path.join(self.tools.ninja, "ninja"), "-t", "deps"], cwd=self.work, stdout=subprocess.PIPE)
        read = {os.path.join(self.work, os.fsdecode(line.strip())) for line in done.stdout.splitlines() if line.startswith(b"    ")}
        if self.tools.nvrtc is not None:
            from opjit.cpp_extension import cuda

            read |= cuda.headers_read(self.work)
        read = {os.path.realpath(path) if path.startswith(f"{self.work}{os.sep}") else path for path in read}  # of what a toolkit lacks
        found = {}
        for name, path in self.extension.other_headers(read, self.trusted()).items():
            if os.stat(path).st_ctime_ns >= self.started:  # the time of modification may lie in the future
                raise self.subject.fault(f"{path} changed during compilation; load it again")
            found[name] = files.digest(path)
        return found


def _check_runtime(extension: Extension, cxx: Compiler, needed: frozenset[str], content: bytes) -> None:
    """Warn of a library with a C++ library of its own: it crashes when it formats a number, as two sets of locales share their indices."""
    shared = any(name.startswith(("libstdc++.", "libc++.")) for name in needed)
    if not shared and b"\0_ZNSt6locale7classicEv\0" in content:
        warnings.warn(CompileWarning(f"{extension.name} holds a second C++ library, as {cxx.path} or a flag links it statically; that "
                                     "crashes when a number becomes text, such as in TORCH_CHECK. Name another compiler in CXX"),
                      stacklevel=2)


def _blame_name(error: BuildError, name: str, output: str) -> BuildError:
    """Explain errors that come from the extension's name, which is a macro on the command line that no compiler's message mentions."""
    if not name.isidentifier() and re.search("(?<!-D)TORCH_EXTENSION_NAME", output):
        better = re.sub(r"\W|^(?=\d)", "_", name)
        error.args = (f"the name {name!r} becomes TORCH_EXTENSION_NAME, which must be a C++ identifier; use {better}\n{error}",)
    return error

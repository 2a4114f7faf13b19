"""Builds an extension with torch.utils.cpp_extension and publishes the entry.

torch gets the caller's arguments and runs its usual commands, but it builds in a private directory and loads nothing.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import processes, progress
from opjit.builder import budget, runtime_objects, torch_builder
from opjit.builder.compile_step import BuildTools, CompilerFailed, NvccOnly, by_nvrtc_or_nvcc
from opjit.builder.diagnosis import diagnose
from opjit.builder.publish import Compiled, build_and_publish
from opjit.cpp_extension import identity, light, stable, static_init
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import mistakes
from opjit.errors import BuildError, CompileWarning, LoadError
from opjit.recipe import compilers, nvcc_flags, reads, toolchain, unreported
from opjit.recipe.compilers import Nvrtc
from opjit.recipe.reads import Moment, Reads
from opjit.recipe.reports import ASSEMBLED, LINKED, ReportReader, Search
from opjit.shared_library.objects import KeptObjects
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.store import OBJECTS, PARTS, Store

_EDGE = re.compile(r"^build (\S+): (?:cuda_)?compile .+\n", re.MULTILINE)
LISTED = stable.LISTING
_RELATIVE = re.compile(r"(?<!\S)-L(?=[\w.])")  # the start of a relative folder of libraries


def build(
    extension: Extension, call: LoadCall | InlineCall, store: Store, must_store: bool = False
) -> Entry:
    """Build an extension and publish it in the store or, if the store cannot be written, for this process only.

    Raises ToolMissing, CompileError, BuildError, LoadError if opening the library would end the
    process, and light.NeedsFullHeaders if torch/extension.h may help.
    """
    tools = _tools(extension, store)
    extension = replace(
        extension, toolchain=identity.compiler_identity(tools.compiler, tools.nvccs, tools.nvcc)
    )

    def compile_in(work: Path, base: Path, started: int) -> Compiled:
        moment = Moment(extension.texts)
        flags = light.policy.macro_flags(extension)
        given = (base, work, tools.compiler, extension.pybind11, flags, extension.include)
        prepared = light.Prepared(*given) if extension.light else None
        trusted = identity.trusted_folders(
            [tools.compiler, tools.nvcc, tools.nvrtc],
            str(light.headers.OWN),
            *map(str, runtime_objects.part_folders(base, PARTS, OBJECTS)),
        )
        more = [
            *light.vocabulary.versions(tools.compiler),
            tools.nvrtc and tools.nvrtc.version,
            prepared and prepared.versions(),
        ]
        search = identity.searched(call, tools.compiler, store.notes)
        system = extension.places.system
        return _ExtensionBuild(
            extension,
            call,
            tools,
            work,
            base,
            prepared,
            KeptObjects(extension, base, work, more, moment),
            ReportReader(str(work), str(work), moment, system, trusted, started),
            search,
        ).compiled()

    return build_and_publish(extension, store, must_store, compile_in)


def _tools(extension: Extension, store: Store) -> BuildTools:
    cxx = toolchain.require_cxx(store.notes)
    if extension.archs is None:
        return BuildTools(cxx, None, None, toolchain.require_ninja())
    nvrtc = identity.find_nvrtc(store.notes) if extension.light else None
    nvcc = toolchain.find_nvcc(store.notes) if nvrtc else toolchain.require_nvcc(store.notes)
    return BuildTools(
        cxx, nvcc, nvrtc, toolchain.require_ninja(), nvccs=toolchain.find_compiler(store.notes)
    )


def _reporting(text: str, with_light: bool) -> str:
    """Return torch's build file with compilers and assemblers that list all files that they read.

    `with_light`: each source has a directory of light headers, and a header that comes first.
    """
    folder = "-Ilight/$out" if with_light else ""
    first = f"-include light/$out/{light.core.FIRST}" if with_light else ""
    text = text.replace(
        " -MMD -MF $out.d ",
        f" -MD -MF $out{LISTED} -Xassembler --MD -Xassembler $out{ASSEMBLED} {folder} {first} ",
    )
    of_host = f"-Xcompiler '-Wa\\,--MD\\,$out{ASSEMBLED}'"
    text = text.replace(
        " --dependency-output $out.d ", f" --dependency-output $out{LISTED} {of_host} {folder} "
    )
    return re.sub(r"^  (?:depfile|deps) = .*\n", "", text, flags=re.MULTILINE)


class _ExtensionBuild(NamedTuple):
    """A build in the private folder `work`; `base` is the store's, and `prepared` is None for torch/extension.h."""

    extension: Extension
    call: LoadCall | InlineCall
    tools: BuildTools
    work: Path
    base: Path
    prepared: light.Prepared | None
    objects: KeptObjects
    recorder: ReportReader
    search: Search | None

    def compiled(self) -> Compiled:
        """Compile and link."""
        extension = self.extension
        work = self.work
        by_nvrtc, remark = self.compile_all()
        with_headers = (
            self.prepared.note if self.prepared else f"torch's own headers: {extension.reason}"
        )
        if identity.EMULATED in extension.flags["c"]:
            with_headers += "; its CUDA code is emulated on the CPU"
        progress.log(f"{extension.name} is built with {with_headers}")
        library = work / f"{extension.name}.so"
        read = self.linked()
        if extension.stable:
            listed = list(work.glob(f"*{LISTED}"))
            why_not = stable.refusal(extension, library, self.tools.compiler, listed)
            if why_not:
                extension = replace(extension, stable="")
                with_headers += f"; it works only with this torch and Python, because {why_not}"
        names = ("build.ninja", "main.cpp", "cuda.cu")  # as torch names them
        others = [work / name for name in names if (work / name).is_file()]
        remarks = {
            "torch": torch.__version__,
            "headers": f"{with_headers}; {remark}" if remark else with_headers,
        }
        return Compiled(
            replace(extension, toolchain=by_nvrtc or extension.toolchain),
            library,
            self.tools.compiler.path,
            read,
            others,
            remarks,
            check=self.check,
        )

    def check(self, library: Path) -> None:
        """Raise an error if the library would end the process or, with light headers, does not open."""
        content = library.read_bytes()
        shared = any(
            name.startswith(("libstdc++.", "libc++.")) for name in elf.inspect(content).needed
        )
        if (
            not shared and b"\0_ZNSt6locale7classicEv\0" in content
        ):  # two sets of locales would share indices
            warnings.warn(
                CompileWarning(
                    f"{self.extension.name} contains a static C++ library, linked by {self.tools.compiler.path} or by a "
                    "flag; it will crash when it formats a number, for example in TORCH_CHECK. Remove the flag, or set "
                    "CXX to another compiler"
                ),
                stacklevel=2,
            )
        reason = static_init.check_in_child(str(library), self.extension.name)
        if reason is not None and self.prepared:
            raise light.NeedsFullHeaders(
                LoadError(
                    f"cannot load {self.extension.name}: {reason}; define the missing function, or link its library"
                )
            )

    def compile_all(self) -> tuple[Mapping[str, str] | None, str]:
        """Compile and link. Returns the compilers' identity if NVRTC is among them, and a remark on that."""
        tools = self.tools
        extension = self.extension
        if tools.nvrtc is None:
            self.compile(nullcontext())
            return None, ""

        def by_nvrtc(nvrtc: Nvrtc) -> Mapping[str, str]:
            from opjit.cpp_extension import cuda

            assert self.prepared is not None  # NVRTC is only for light headers
            try:
                self.compile(
                    cuda.compiled(extension, self.work, self.prepared, nvrtc, tools.ninja),
                    by_nvrtc=True,
                )
            except CompilerFailed as failed:
                folders = (
                    *nvrtc.headers.split(":"),
                    *([f"{tools.nvcc.root}/include"] if tools.nvcc else ()),
                )
                if self.is_final(str(failed), folders):
                    raise self.diagnosed(str(failed)) from None
                raise
            return identity.compiler_identity(tools.compiler, None, nvrtc)

        return by_nvrtc_or_nvcc(
            extension.name, tools, by_nvrtc, lambda: self.compile(nullcontext()), self.diagnosed
        )

    def compile(self, around: AbstractContextManager[None], by_nvrtc: bool = False) -> None:
        """Let torch write the build file, and run ninja in a block for the object files that are not in the cache."""
        environment: dict[str, str | None] = {
            **compilers.NEUTRAL,
            **compilers.honoured(),
            "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": None,
            "CCACHE_BASEDIR": str(self.work),
            "CCACHE_NOHASHDIR": "1",
        }  # a hit in any other private folder
        given = {
            "TORCH_CUDA_ARCH_LIST": self.extension.archs,
            "CC": toolchain.split_launcher("CC")[1],
        }
        environment |= {name: value for name, value in given.items() if value}
        variables = (
            torch_builder.settings()
        )  # torch's guess of CUDA_HOME is wrong if nvcc is a wrapper script
        if self.tools.nvcc is not None:
            variables["CUDA_HOME"] = self.tools.nvcc.root
        elif self.tools.nvrtc is not None:
            variables["CUDA_HOME"] = self.tools.nvrtc.as_toolkit(self.work)
        launcher = toolchain.split_launcher("CXX")[0]
        if launcher and hasattr(
            torch_builder.private_copy(), "_wrap_compiler"
        ):  # torch from 2.13 on quotes a command of two words
            environment["CXX"] = self.tools.compiler.path
            variables["_wrap_compiler"] = lambda command: [
                *launcher,
                *([command] if isinstance(command, str) else command),
            ]
        try:
            needs = (
                (budget.CXX_JOB, budget.NVCC_JOB)
                if self.prepared
                else (budget.TORCH_CXX_JOB, budget.TORCH_NVCC_JOB)
            )
            torch_builder.call(
                self.call.function,
                self.arguments(),
                self.tools.ninja,
                environment,
                variables,
                needs,
                self.without_kept(around, by_nvrtc),
            )
        except torch_builder.NinjaFailed as failed:
            error = self.diagnosed(str(failed))
            raise (
                error
                if self.prepared is None or self.is_final(str(failed))
                else light.NeedsFullHeaders(error)
            ) from None

    @contextmanager
    def without_kept(self, around: AbstractContextManager[None], by_nvrtc: bool) -> Iterator[None]:
        """A block for ninja's run, without the edges of cached object files. New ones are kept, even if another source fails."""
        place = self.work / "build.ninja"
        written = place.read_text("utf-8", "surrogateescape")
        listed = json.loads(self.ninja("compdb", "compile", "cuda_compile") or "[]")
        edges = {edge["output"]: self._edge(edge, by_nvrtc) for edge in listed}
        several = len(listed) > 1 and not self.extension.stable
        known = {out for out, edge in edges.items() if several and self.objects.take(*edge)}
        progress.log(f"{len(known)} of {len(listed)} object files are in the cache")
        if self.prepared:
            made = [edge for edge in listed if edge["output"] not in known]
            self.check_text(made, by_nvrtc)
        others = _EDGE.sub(lambda edge: "" if edge[1] in known else edge[0], written)
        reporting = _reporting(others, self.prepared is not None)
        place.write_text(reporting, "utf-8", "surrogateescape")
        try:
            with around:
                if self.prepared:
                    programs = self.prepared.programs.values()
                    if not known and not any(program.names_torch for program in programs):
                        raise self.lacks("it includes none of torch's headers")
                    self.prepared.provide_binding()
                yield
        finally:
            place.write_text(written, "utf-8", "surrogateescape")  # people read torch's commands
            for out in edges.keys() - known:
                self._record(out, edges[out])

    def _edge(self, edge: dict[str, str], by_nvrtc: bool) -> tuple[str, str, Path]:
        """Return the source, the command and the object file of a compilation in torch's build file."""
        instead = "NVRTC " if by_nvrtc and edge["file"].endswith(identity.CUDA) else ""
        source = os.path.join(self.work, edge["file"])
        return source, instead + edge["command"], self.work / edge["output"]

    def _record(self, out: str, edge: tuple[str, str, Path]) -> None:
        """Record what made an object file, if it was made, and keep it."""
        by_nvrtc = self.work / "cuda" / out
        read = reads.listed(self.work.glob(f"{out}{LISTED}"))
        read += reads.listed_absolute(by_nvrtc.rglob("*.deps"))
        if not read:
            return
        assembled = reads.listed(
            [*self.work.glob(f"{out}{ASSEMBLED}"), *by_nvrtc.glob(f"*{ASSEMBLED}")]
        )
        words = [*(self.call.extra_cflags or ()), *(self.call.extra_cuda_cflags or ())]
        output = torch_builder.output_of(self.work)
        recorded = self.recorder.compiled(read, assembled, self.search, output, words)
        self.objects.keep(*edge, recorded)

    def linked(self) -> Reads:
        """Return what all tools read: for each object, and for the link."""
        output = torch_builder.output_of(self.work)
        linked = self.recorder.linked(self.work / LINKED, output)
        return functools.reduce(Reads.joined, self.objects.read.values(), linked)

    def check_text(self, edges: Iterable[Mapping[str, str]], by_nvrtc: bool) -> None:
        """Raise light.NeedsFullHeaders if a source has other tokens with torch/extension.h than with light headers."""
        for edge in edges:
            scratch = self.work / "preprocessed" / edge["output"]
            scratch.mkdir(parents=True, exist_ok=True)
            try:
                self._check_source(edge, scratch, by_nvrtc)
            except (light.streams.Different, NvccOnly) as different:
                raise self.lacks(str(different)) from None
            except CompilerFailed as failed:
                error = self.diagnosed(str(failed))
                if self.is_final(str(failed)):
                    raise error from None
                raise light.NeedsFullHeaders(error) from None

    def lacks(self, reason: str) -> light.NeedsFullHeaders:
        """Return the error of a program that light headers cannot compile."""
        error = BuildError(reason, op=self.extension.name, target=self.extension.purpose)
        return light.NeedsFullHeaders(error)

    def _check_source(self, edge: Mapping[str, str], scratch: Path, by_nvrtc: bool) -> None:
        """Write a source's headers and compare its text. The text of a CUDA file for NVRTC is made with torch's macros."""
        assert self.prepared is not None
        source = os.path.join(self.work, edge["file"])
        if not source.endswith(identity.CUDA):
            self.prepared.check(edge["file"], edge["command"], edge["output"], scratch)
        elif not by_nvrtc and self.tools.nvcc is not None:
            from opjit.cpp_extension import cuda

            cuda.check_for_nvcc(self.prepared, self.tools.nvcc, source, edge["output"], scratch)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for torch."""
        passed = {
            name: list(value) if isinstance(value, (list, tuple)) else value
            for name, value in self.call.for_torch().items()
        }
        include = passed["extra_include_paths"] or []
        link = passed["extra_ldflags"] or []
        if self.prepared:
            include = [*self.prepared.folders, *include]
            link = [torch_builder.quote(str(self.prepared.linked_binding)), *link]
        if (
            self.extension.stable
        ):  # torch's libraries export parts of the C++ library, and would come first
            link = ["-Wl,--as-needed,-lstdc++,--no-as-needed", *link]
        if self.tools.nvcc is not None:
            include = [
                *include,
                toolchain.link_missing_headers(self.tools.nvcc, self.work / "lacking"),
            ]
        # Keep the temporary directory out of messages, __FILE__ and debug information. The last map that fits counts.
        names = [f"-ffile-prefix-map={self.work}=.", f"-ffile-prefix-map={self.work}/="]
        names += [unreported.DATE_WARNING, "-Wno-error=date-time"]
        first = ["-include", os.devnull]  # GCC uses a precompiled header only for the first header
        passed["extra_cflags"] = [
            *map(torch_builder.quote, [*first, *names]),
            *(passed["extra_cflags"] or ()),
        ]
        passed["extra_cuda_cflags"] = [
            *map(torch_builder.quote, nvcc_flags.for_nvcc(names, [])),
            *(passed["extra_cuda_cflags"] or ()),
        ]
        if self.extension.sources:
            passed["sources"] = list(
                self.extension.sources
            )  # in the key's order, which decides the order of static initializers
        else:
            passed["use_pch"] = False
            include = [*include, *identity.quoted_folder(self.call)]
        if (
            self.call.build_directory
        ):  # torch links there, so relative directories of libraries start there
            directory = shlex.quote(os.path.abspath(self.call.build_directory)).replace("$", "$$")
            link = [_RELATIVE.sub(lambda _: f"-L{directory}/", flag) for flag in link]
        return {
            **passed,
            "name": self.extension.name,
            "build_directory": str(self.work),
            "extra_include_paths": include,
            "extra_ldflags": [*link, f"-Wl,--dependency-file={LINKED},--verbose"],
        }

    def is_final(self, output: str, cuda: tuple[str, ...] = ()) -> bool:
        """Whether the first error in a compiler's output also occurs with torch/extension.h."""
        return self.prepared is not None and mistakes.is_final(
            output, self.prepared, self.work, cuda
        )

    def diagnosed(self, output: str) -> BuildError:
        """Make the error of a compiler's output."""
        extension = self.extension
        if (
            not extension.sources
        ):  # flags for this change the binary only, not the compilers' messages
            output = output.replace(f"{self.work}{os.sep}", "").replace(str(self.work), ".")
        error = diagnose(output, extension.name, extension.purpose, self.base / "logs")
        name = extension.name
        if not name.isidentifier() and re.search(
            "(?<!-D)TORCH_EXTENSION_NAME", output
        ):  # a macro that no compiler's message mentions
            better = re.sub(r"\W|^(?=\d)", "_", name)
            error.args = (
                f"the name {name!r} becomes TORCH_EXTENSION_NAME, which must be a C++ identifier; use {better}\n{error}",
            )
        return error

    def ninja(self, *words: str) -> str:
        """Return the output of one of ninja's tools."""
        done = processes.run(
            [os.path.join(self.tools.ninja, "ninja"), "-t", *words],
            cwd=self.work,
            stdout=subprocess.PIPE,
        )
        return os.fsdecode(done.stdout)

"""Builds an extension with torch.utils.cpp_extension and publishes the entry: torch gets the caller's arguments and runs its usual
commands, but it builds in a private folder and loads nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import processes, progress
from opjit.builder import budget, torch_builder
from opjit.builder.compile_step import BuildTools, CompilerFailed, by_nvrtc_or_nvcc
from opjit.builder.diagnosis import diagnose
from opjit.cpp_extension import identity, light, stable, static_init
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import mistakes
from opjit.errors import BuildError, CompileWarning, LoadError
from opjit.recipe import nvcc_flags, toolchain
from opjit.recipe.toolchain import Nvrtc
from opjit.shared_library.objects import KeptObjects
from opjit.shared_library.publication import Compiled, build_and_publish
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.store import Store

_EDGE = re.compile(r"^build (\S+): (?:cuda_)?compile .+\n", re.MULTILINE)
_DEPS = re.compile(r"^(.+): #deps .*\(VALID\)\n((?:    .+\n)*)", re.MULTILINE)
_RELATIVE = re.compile(r"(?<!\S)-L(?=[\w.])")  # the start of a relative folder of libraries


def build(
    extension: Extension, call: LoadCall | InlineCall, store: Store, must_store: bool = False
) -> Entry:
    """Build an extension and publish it in the store or, if the store cannot be written, for this process only. Raises ToolMissing,
    CompileError, BuildError, LoadError if opening the library would end the process, and light.MayLack if torch/extension.h may help."""
    tools = _tools(extension, store)
    extension = replace(
        extension, toolchain=identity.compiler_identity(tools.compiler, tools.nvccs, tools.nvcc)
    )

    def compile_in(work: Path, base: Path) -> Compiled:
        prepared = (
            light.prepare(extension, call.implicit, work, base, tools.compiler)
            if extension.light
            else None
        )
        trusted = identity.trusted_prefixes(
            [tools.compiler, tools.nvcc, tools.nvrtc],
            sysconfig.get_path("include"),
            sysconfig.get_path("platinclude"),
            str(work),
            *([str(light.headers.OWN)] if prepared else []),
        )
        more = [
            *light.vocabulary.versions(tools.compiler),
            tools.nvrtc and tools.nvrtc.version,
            prepared and prepared.contents(),
        ]
        return _ExtensionBuild(
            extension,
            call,
            tools,
            work,
            base,
            prepared,
            KeptObjects(extension, base, work, more, trusted),
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


class _ExtensionBuild(NamedTuple):
    """A build in the private folder `work`; `base` is the store's, and `prepared` is None for torch/extension.h."""

    extension: Extension
    call: LoadCall | InlineCall
    tools: BuildTools
    work: Path
    base: Path
    prepared: light.Prepared | None
    objects: KeptObjects

    def compiled(self) -> Compiled:
        """Compile and link."""
        extension, work = self.extension, self.work
        with_headers = (
            self.prepared.note if self.prepared else f"torch's own headers: {extension.reason}"
        )
        progress.log(f"{extension.name} is built with {with_headers}")
        by_nvrtc, remark = self.compile_all()
        library, read, cxx = work / f"{extension.name}.so", self.headers_read(), self.tools.compiler
        trusted = self.objects.trusted
        if extension.stable and (
            refusal := stable.refusal(extension, self.call.implicit, library, cxx, read, trusted)
        ):
            extension = replace(extension, stable="")
            with_headers += f"; only this torch and Python take it, as {refusal}"
        others = [work / name for name in ("build.ninja", *light.INLINE) if (work / name).is_file()]
        remarks = {
            "torch": torch.__version__,
            "headers": f"{with_headers}; {remark}" if remark else with_headers,
        }
        return Compiled(
            replace(extension, toolchain=by_nvrtc or extension.toolchain),
            library,
            cxx.path,
            read.union(*stable.listings(work)),
            trusted,
            others,
            remarks,
            self.check,
        )

    def check(self, library: Path) -> None:
        """Raise an error if the library would end the process or, with light headers, does not open."""
        content = library.read_bytes()
        shared = any(
            name.startswith(("libstdc++.", "libc++.")) for name in elf.inspect(content).needed
        )
        if (
            not shared and b"\0_ZNSt6locale7classicEv\0" in content
        ):  # two sets of locales share their indices
            warnings.warn(
                CompileWarning(
                    f"{self.extension.name} holds a second C++ library, as {self.tools.compiler.path} or a flag links "
                    "it statically; that crashes when a number becomes text, such as in TORCH_CHECK. Name another "
                    "compiler in CXX"
                ),
                stacklevel=2,
            )
        if not static_init.check_in_child(str(library), self.extension.name) and self.prepared:
            raise light.MayLack(
                LoadError(
                    f"{self.extension.name} does not open: a function is missing in torch's libraries"
                )
            )

    def compile_all(self) -> tuple[Mapping[str, str] | None, str]:
        """Compile and link. Returns the compilers' identity if NVRTC is among them, and a remark on that."""
        tools, extension = self.tools, self.extension
        if tools.nvrtc is None:
            self.compile(nullcontext())
            return None, ""

        def by_nvrtc(nvrtc: Nvrtc) -> Mapping[str, str]:
            from opjit.cpp_extension import cuda

            try:
                self.compile(
                    cuda.compiled(extension, self.work, tools.compiler, nvrtc, tools.ninja),
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
        """Have torch write the build file, and ninja run in a block, for objects that are not kept."""
        environment: dict[str, str | None] = {
            "LC_ALL": "C",
            "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": None,
            "CCACHE_BASEDIR": str(self.work),
            "CCACHE_NOHASHDIR": "1",
        }  # a hit in any other private folder
        given = {"TORCH_CUDA_ARCH_LIST": self.extension.archs, "CC": toolchain.named("CC")[1]}
        environment |= {name: value for name, value in given.items() if value}
        variables = (
            torch_builder.settings()
        )  # torch's guess of CUDA_HOME is wrong if nvcc is a wrapper script
        if self.tools.nvcc is not None:
            variables["CUDA_HOME"] = self.tools.nvcc.root
        elif self.tools.nvrtc is not None:
            variables["CUDA_HOME"] = self.tools.nvrtc.as_toolkit(self.work)
        launcher = toolchain.named("CXX")[0]
        if launcher and hasattr(
            torch_builder.copy(), "_wrap_compiler"
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
                else light.MayLack(error)
            ) from None

    @contextmanager
    def without_kept(self, around: AbstractContextManager[None], by_nvrtc: bool) -> Iterator[None]:
        """A block for ninja's run, without the edges of kept objects; keeps new ones, also where another source failed."""
        place = self.work / "build.ninja"
        written = place.read_text("utf-8", "surrogateescape")
        listed = json.loads(self.ninja("compdb", "compile", "cuda_compile") or "[]")
        instead = {
            edge["output"]: "NVRTC "
            for edge in listed
            if by_nvrtc and edge["file"].endswith(identity.CUDA)
        }
        edges = {
            (out := edge["output"]): (
                os.path.join(self.work, edge["file"]),
                instead.get(out, "") + edge["command"],
                self.work / out,
            )
            for edge in listed
            if len(listed) > 1 and not self.extension.stable
        }  # whose key has no torch, and whose proof needs all that was read
        known = {out for out, edge in edges.items() if self.objects.take(*edge)}
        progress.log(f"{len(known)} of {len(listed)} object files are in the cache")
        if self.prepared:
            self.check_text(edge for edge in listed if edge["output"] not in known)
        place.write_text(
            _EDGE.sub(lambda edge: "" if edge[1] in known else edge[0], written),
            "utf-8",
            "surrogateescape",
        )
        made = dict[str, set[str]]()
        try:
            with around:
                made = self.read_for_nvrtc() if by_nvrtc else {}
                yield
        finally:
            place.write_text(written, "utf-8", "surrogateescape")  # people read torch's commands
            for out, read in (made | self.deps()).items():
                if out in edges.keys() - known:
                    self.objects.keep(*edges[out], read)

    def check_text(self, edges: Iterable[Mapping[str, str]]) -> None:
        """Raise light.MayLack if a source that is compiled with light headers is another text with torch/extension.h."""
        assert self.prepared is not None
        for edge in edges:
            if edge["file"].endswith(identity.CUDA):
                continue
            scratch = self.work / "preprocessed" / edge["output"]
            scratch.mkdir(parents=True)
            try:
                self.prepared.check(edge["file"], edge["command"], self.work, scratch)
            except light.streams.Different as different:
                name, purpose = self.extension.name, self.extension.purpose
                raise light.MayLack(BuildError(str(different), op=name, target=purpose)) from None
            except CompilerFailed as failed:
                error = self.diagnosed(str(failed))
                if self.is_final(str(failed)):
                    raise error from None
                raise light.MayLack(error) from None

    def arguments(self) -> dict[str, Any]:
        """Return those that torch gets."""
        passed = {
            name: list(value) if isinstance(value, (list, tuple)) else value
            for name, value in self.call.for_torch().items()
        }
        include, link = passed["extra_include_paths"] or [], passed["extra_ldflags"] or []
        if self.prepared:
            include = [*self.prepared.folders, *include]
            link = [*map(torch_builder.quote, self.prepared.objects), *link]
        if (
            self.extension.stable
        ):  # torch's libraries export what they use of the C++ library, and would come first
            link = ["-Wl,--as-needed,-lstdc++,--no-as-needed", *link]
            listing = torch_builder.quote(
                f"-Wp,-MD,{torch_builder.UNIQUE}{stable.LISTING}"
            )  # torch's own has none of its headers
            passed["extra_cflags"] = [*(passed["extra_cflags"] or ()), listing]
        if self.tools.nvcc is not None:
            include = [*include, toolchain.lacking(self.tools.nvcc, self.work / "lacking")]
        # Messages, __FILE__ and debug information shall name no temporary folder: the last map that fits counts.
        names = [f"-ffile-prefix-map={self.work}=.", f"-ffile-prefix-map={self.work}/="]
        passed["extra_cflags"] = [*map(torch_builder.quote, names), *(passed["extra_cflags"] or ())]
        passed["extra_cuda_cflags"] = [
            *map(torch_builder.quote, nvcc_flags.for_nvcc(names, [])),
            *(passed["extra_cuda_cflags"] or ()),
        ]
        if self.extension.sources:
            passed["sources"] = list(
                self.extension.sources
            )  # in the key's order, which decides that of static initialisers
        else:
            passed["use_pch"] = False
            include = [*include, *identity.header_folder(self.call, self.extension.texts.values())]
        if (
            self.call.build_directory
        ):  # torch links there, so that is what relative folders of libraries mean
            directory = shlex.quote(os.path.abspath(self.call.build_directory)).replace("$", "$$")
            link = [_RELATIVE.sub(lambda _: f"-L{directory}/", flag) for flag in link]
        return {
            **passed,
            "name": self.extension.name,
            "build_directory": str(self.work),
            "extra_include_paths": include,
            "extra_ldflags": link,
        }

    def is_final(self, output: str, cuda: tuple[str, ...] = ()) -> bool:
        """Whether the first error in a compiler's output is there with torch/extension.h, too."""
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
        error, name = (
            diagnose(output, extension.name, extension.purpose, self.base / "logs"),
            extension.name,
        )
        if not name.isidentifier() and re.search(
            "(?<!-D)TORCH_EXTENSION_NAME", output
        ):  # a macro that no compiler's message mentions
            better = re.sub(r"\W|^(?=\d)", "_", name)
            error.args = (
                f"the name {name!r} becomes TORCH_EXTENSION_NAME, which must be a C++ identifier; use {better}\n{error}",
            )
        return error

    def headers_read(self) -> set[str]:
        """Return the paths of the files that the compilers read."""
        read = self.objects.read.union(*self.read_for_nvrtc().values(), *self.deps().values())
        return {
            os.path.realpath(path) if path.startswith(f"{self.work}{os.sep}") else path
            for path in read
        }  # of what a toolkit lacks

    def read_for_nvrtc(self) -> dict[str, set[str]]:
        """Return the paths of the files that the host's compiler read for CUDA files that NVRTC takes, by object file."""
        if self.tools.nvrtc is None:
            return {}
        from opjit.cpp_extension import cuda

        return cuda.headers_read(self.work)

    def deps(self) -> dict[str, set[str]]:
        """Return the paths of the files that compilers of ninja's read, by the object files that they made."""
        found = _DEPS.findall(self.ninja("deps"))
        return {
            out: {os.path.join(self.work, line.strip()) for line in lines.splitlines()}
            for out, lines in found
        }

    def ninja(self, *words: str) -> str:
        """Return what a tool of ninja's says of the build."""
        done = processes.run(
            [os.path.join(self.tools.ninja, "ninja"), "-t", *words],
            cwd=self.work,
            stdout=subprocess.PIPE,
        )
        return os.fsdecode(done.stdout)

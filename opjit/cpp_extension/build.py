"""Builds an extension with torch.utils.cpp_extension and publishes the entry.

torch gets the caller's arguments and describes its usual build. opjit runs the commands in a private directory, and loads nothing.
"""

import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from opjit import processes, progress
from opjit.builder import budget, ninja, parts, torch_builder
from opjit.builder.compile_step import (
    CommandFailed,
    CompilerFailed,
    by_nvrtc_or_nvcc,
)
from opjit.builder.publish import Compiled, build_and_publish
from opjit.builder.torch_builder import CompiledSource, TorchBuild
from opjit.cpp_extension import identity, light, stable, static_init
from opjit.cpp_extension.arguments import InlineCall, LoadCall
from opjit.cpp_extension.identity import Extension
from opjit.cpp_extension.light import mistakes
from opjit.errors import BuildError, CompileWarning, LoadError
from opjit.recipe import compilers, gpu_archs, nvcc_flags, recorder, toolchain
from opjit.recipe.compilers import Nvrtc
from opjit.recipe.nvcc_flags import NvccOnly
from opjit.recipe.reads import Moment, Reads
from opjit.recipe.record_reader import RecordReader
from opjit.recipe.toolchain import BuildTools
from opjit.shared_library.objects import KeptObjects
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.store import Store

_RELATIVE = r"(?<!\S)-L(?=[\w.])"  # the start of a relative folder of libraries


def build(
    extension: Extension, call: LoadCall | InlineCall, store: Store, must_store: bool = False
) -> Entry:
    """Build an extension and publish it in the store or, if the store cannot be written, for this process only.

    Raises ToolMissing, CompileError, BuildError, LoadError if opening the library would end the
    process, and light.NeedsFullHeaders if torch/extension.h may help.
    """
    tools = _tools(extension, store)
    extension = replace(extension, toolchain=toolchain.identity(tools.cc, tools.nvcc, tools.cxx))

    def compile_in(extension: Extension, work: Path, base: Path, started: int) -> Compiled:
        moment = Moment(extension.texts)
        flags = light.policy.macro_flags(extension)
        given = (base, work, tools.compiler, extension.pybind11, flags, extension.include)
        prepared = light.Prepared(*given) if extension.light else None
        known = map(str, (light.headers.OWN, *parts.part_folders(base)))
        trusted = identity.trusted_folders(*known, tools=tools)
        more = [
            *light.vocabulary.versions(tools.compiler),
            tools.nvrtc and tools.nvrtc.version,
            prepared and prepared.versions(),
        ]
        return _ExtensionBuild(
            extension,
            call,
            tools,
            work,
            base,
            prepared,
            KeptObjects(extension, base, RecordReader(str(work), moment, trusted, started), more),
        ).compiled()

    return build_and_publish(extension, store, must_store, compile_in)


def _tools(extension: Extension, store: Store) -> BuildTools:
    cxx = toolchain.require_cxx(store.notes)
    if extension.archs is None:
        return BuildTools(None, cxx)
    nvrtc = identity.find_nvrtc(store.notes) if extension.light else None
    nvcc = identity.find_nvcc(store.notes) if nvrtc else toolchain.require_nvcc(store.notes)
    listed = ["sm_" + arch.replace(".", "") for arch in re.findall(r"\d+\.\d", extension.archs)]
    known = gpu_archs.supported_by(nvrtc, store.notes) if nvrtc else set()
    gpu_archs.require_known(listed, known.union(nvcc.archs.split() if nvcc else ()))
    return BuildTools(toolchain.find_compiler(store.notes), cxx, nvcc, nvrtc)


_Outcome = tuple[Reads, Mapping[str, str] | None]  # of all tools, and the compilers' identity


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
        extension = self.extension
        work = self.work
        build = self.described()
        (read, made_by), remark = self.compile_all(build)
        with_headers = (
            self.prepared.note if self.prepared else f"torch's own headers: {extension.reason}"
        )
        if identity.EMULATED in extension.flags["c"]:
            with_headers += "; its CUDA code is emulated on the CPU"
        progress.log(f"{extension.name} is built with {with_headers}")
        library = work / f"{extension.name}.so"
        if extension.stable:
            compiler = self.tools.compiler
            why_not = stable.refusal(extension, library, compiler, build.compilations)
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
            replace(extension, toolchain=made_by),
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

    def compile_all(self, build: TorchBuild) -> tuple[_Outcome, str]:
        """Compile and link, with NVRTC if possible. Returns the reads of all tools, the compilers' identity, and a remark on NVRTC."""
        tools = self.tools

        def by_nvrtc(nvrtc: Nvrtc) -> _Outcome:
            try:
                read = self.compile(build, nvrtc)
            except CompilerFailed as failed:
                folders = nvrtc.headers.split(":")
                if tools.nvcc:
                    folders.append(f"{tools.nvcc.root}/include")
                if self.is_final(str(failed), folders):
                    raise self.diagnosed(str(failed)) from None
                raise
            return read, toolchain.identity(None, nvrtc, tools.cxx)

        def by_nvcc() -> _Outcome:
            return self.compile(build), self.extension.toolchain

        if tools.nvrtc is None:
            return by_nvcc(), ""
        return by_nvrtc_or_nvcc(self.extension.name, tools, by_nvrtc, by_nvcc, self.diagnosed)

    def described(self) -> TorchBuild:
        """Let torch write the build file, and return the build that it describes."""
        environment: dict[str, str | None] = {
            **compilers.NEUTRAL,
            **compilers.honoured(),
            "CXX": self.tools.compiler.path,
        }
        if self.extension.archs:
            environment["TORCH_CUDA_ARCH_LIST"] = self.extension.archs
        if compiler := toolchain.split_launcher("CC")[1]:
            environment["CC"] = torch_builder.quote(compiler)
        variables = torch_builder.settings()
        # torch's guess of CUDA_HOME is wrong if nvcc is a wrapper script.
        if self.tools.nvcc is not None:
            variables["CUDA_HOME"] = self.tools.nvcc.root
        elif self.tools.nvrtc is not None:
            variables["CUDA_HOME"] = self.tools.nvrtc.as_toolkit(self.work)
        try:
            call = self.torch_call()
            passed = call.for_torch()
            return torch_builder.describe_build(call.function, passed, environment, variables)
        except CommandFailed as failed:
            raise self.refused(str(failed)) from None

    def compile(self, build: TorchBuild, nvrtc: Nvrtc | None = None) -> Reads:
        """Compile all object files that are not in the cache, .cu files with NVRTC if it is given, and link. Returns what all tools read.

        Object files are kept even if another source fails.
        """
        steps = {}
        # C++ comes first, because nvcc cannot fix an error in it.
        for compilation in sorted(build.compilations, key=attrgetter("by_nvcc")):
            steps[compilation] = self._step(build, compilation, nvrtc)
        every = [*steps.values()]
        missing = every if self.extension.stable else self.objects.missing(every)
        progress.log(f"{len(every) - len(missing)} of {len(every)} object files are in the cache")
        made = {each: step for each, step in steps.items() if step in missing}
        for step in (step for each, step in made.items() if each.by_nvcc):
            step.done.unlink(missing_ok=True)  # of NVRTC, which nvcc may follow
            step.log.unlink(missing_ok=True)
        link = build.link_step(self.cxx, self.work)
        compiling = partial(self._compile_sources, build, made, nvrtc, missing == every)
        jobs: list[Callable[[], None]] = [compiling]
        width = 1
        if self.prepared:
            jobs.append(self.prepared.provide_binding)  # the first one takes 8 s
            sources = [str(self.work / each.source) for each in made]
            program = light.policy.program_of(sources, self.prepared.flags)
            if program.names_torch and budget.width(budget.TORCH_CXX_JOB) > 1:
                width = 2
        try:
            processes.in_parallel(lambda job: job(), jobs, width)
            self._run([replace(link, needs=())])  # without rules for them, ninja would refuse it
        except CommandFailed as failed:
            self.objects.keep(missing)  # even if another source failed
            raise self.refused(str(failed)) from None
        self.objects.keep(missing)
        return self.objects.read_by_all([link])

    def _compile_sources(
        self,
        build: TorchBuild,
        made: Mapping[CompiledSource, ninja.ToolCommand],
        nvrtc: Nvrtc | None,
        complete: bool,
    ) -> None:
        """Compile sources, which are `complete` without cached object files."""
        if self.prepared:
            self.check_text(build, made, nvrtc)
        if nvrtc is None:
            self.require_torch(complete)
            self._run([*made.values()])
            return
        job = partial(self._by_nvrtc, build, nvrtc)
        jobs = [partial(job, *each) for each in made.items() if each[0].by_nvcc]
        others = [step for each, step in made.items() if not each.by_nvcc]
        processes.in_parallel(lambda job: job(), [partial(self._run, others), *jobs])
        self.require_torch(complete)  # NVRTC has written the light headers

    def _step(
        self, build: TorchBuild, compilation: CompiledSource, nvrtc: Nvrtc | None
    ) -> ninja.ToolCommand:
        """Return the step that compiles a source, for ninja unless NVRTC compiles it."""
        compiler = self.nvcc if compilation.by_nvcc else self.cxx
        out = compilation.out
        flags = [f"-Ilight/{out}"] if self.prepared else []
        if self.prepared and not compilation.by_nvcc:
            flags += ["-include", f"light/{out}/{light.core.FIRST}"]
        command = build.compile_command(compilation, compiler, flags)
        key = shlex.join(build.compile_command(compilation, compiler))
        if nvrtc and compilation.by_nvcc:
            key = f"NVRTC {key}"
        return ninja.ToolCommand(command, self.work / out, self.work, (), compilation.source, key)

    def _by_nvrtc(
        self, build: TorchBuild, nvrtc: Nvrtc, compilation: CompiledSource, step: ninja.ToolCommand
    ) -> None:
        """Compile a .cu file by NVRTC and the C++ compiler."""
        from opjit.cpp_extension import cuda

        assert self.prepared is not None  # NVRTC is only for light headers
        cuda.compile_file(compilation, build.nvcc_flags, self.prepared, nvrtc)
        logs = (self.work / "cuda" / compilation.out).rglob(recorder.LOG)
        step.log.write_bytes(b"".join(map(Path.read_bytes, logs)))
        step.done.touch()

    @property
    def cxx(self) -> list[str]:
        """The launcher and the C++ compiler."""
        return [*toolchain.split_launcher("CXX")[0], self.tools.compiler.path]

    @property
    def nvcc(self) -> list[str]:
        """The words that start nvcc. As for torch, PYTORCH_NVCC is a command of the shell."""
        if command := os.environ.get("PYTORCH_NVCC"):
            return ["sh", "-c", f'{command} "$@"', "sh"]
        root = self.tools.nvcc.root if self.tools.nvcc else ""
        return [f"{root}/bin/nvcc"]

    def _run(self, steps: Sequence[ninja.ToolCommand]) -> None:
        """Run steps of the build, and show their output if the call asks for that."""
        output = ""
        try:
            need = budget.CXX_JOB if self.prepared else budget.TORCH_CXX_JOB
            output = ninja.run_commands(steps, self.work, honours=True, need=need)
        except CommandFailed as failed:
            output = str(failed)
            raise
        finally:
            if self.call.verbose:
                with suppress(UnicodeEncodeError):  # a path that stdout cannot show
                    shown = [shlex.join(step.command) for step in steps]
                    print(*shown, output, sep="\n", flush=True)

    def require_torch(self, complete: bool) -> None:
        """Raise light.NeedsFullHeaders if `complete` sources have light headers and name nothing of torch."""
        if self.prepared is None or not complete:
            return
        if not any(program.names_torch for program in self.prepared.programs.values()):
            raise self.lacks("it includes none of torch's headers")

    def check_text(
        self, build: TorchBuild, made: Iterable[CompiledSource], nvrtc: Nvrtc | None
    ) -> None:
        """Write the light headers of sources. Raise light.NeedsFullHeaders if a source has other tokens with torch/extension.h."""
        assert self.prepared is not None
        for compilation in made:
            scratch = self.work / "preprocessed" / compilation.out
            scratch.mkdir(parents=True, exist_ok=True)
            try:
                if not compilation.by_nvcc:
                    words = build.compile_command(compilation, [])
                    self.prepared.check(compilation.source, words, compilation.out, scratch)
                elif nvrtc is None and self.tools.nvcc:  # NVRTC's text is made with torch's macros
                    from opjit.cpp_extension import cuda

                    given = (compilation, build.nvcc_flags, scratch)
                    cuda.check_for_nvcc(self.prepared, self.tools.nvcc, *given)
            except (light.streams.Different, NvccOnly) as different:
                raise self.lacks(str(different)) from None
            except CompilerFailed as failed:
                raise self.refused(str(failed), True) from None

    def refused(self, output: str, preprocessor: bool = False) -> Exception:
        """Return the error of a tool's output: a BuildError if full headers cannot help, or light.NeedsFullHeaders."""
        error = self.diagnosed(output)
        if self.prepared is None or self.is_final(output):
            return error
        return light.NeedsFullHeaders(error, preprocessor)

    def lacks(self, reason: str) -> light.NeedsFullHeaders:
        """Return the error of a program that light headers cannot compile."""
        error = BuildError(reason, op=self.extension.name, target=self.extension.purpose)
        return light.NeedsFullHeaders(error)

    def torch_call(self) -> LoadCall | InlineCall:
        """Return the call of torch's function that describes the build in this folder."""
        call = self.call
        include = [*(call.extra_include_paths or ()), *identity.quoted_folder(call)]
        link = [*(call.extra_ldflags or ())]
        if self.prepared:
            include = [*self.prepared.folders, *include]
            link = [torch_builder.quote(str(self.prepared.linked_binding)), *link]
        if self.extension.stable:
            # torch's libraries export parts of the C++ library, and would come first.
            link = ["-Wl,--as-needed,-lstdc++,--no-as-needed", *link]
        if self.tools.nvcc is not None:
            lacking = toolchain.link_missing_headers(self.tools.nvcc, self.work / "lacking")
            include.append(lacking)
        if call.build_directory:
            # torch links there, so relative directories of libraries start there.
            directory = torch_builder.quote(os.path.abspath(call.build_directory))
            link = [re.sub(_RELATIVE, lambda _: f"-L{directory}/", flag) for flag in link]

        # Keep the temporary directory out of messages, __FILE__ and debug information. The last map that fits counts.
        names = [f"-ffile-prefix-map={self.work}=.", f"-ffile-prefix-map={self.work}/="]
        cxx = map(torch_builder.quote, names)
        cuda = map(torch_builder.quote, nvcc_flags.for_nvcc(names, []))
        if isinstance(call, LoadCall):
            # In the key's order, which decides the order of static initializers.
            call = replace(call, sources=list(self.extension.sources))
        if isinstance(call, InlineCall):
            call = replace(call, use_pch=False)
        call = replace(call, name=self.extension.name, build_directory=str(self.work))
        return replace(
            call,
            extra_cflags=[*cxx, *(call.extra_cflags or ())],
            extra_cuda_cflags=[*cuda, *(call.extra_cuda_cflags or ())],
            extra_include_paths=include,
            extra_ldflags=link,
        )

    def is_final(self, output: str, cuda: Sequence[str] = ()) -> bool:
        """Whether the first error in a compiler's output also occurs with torch/extension.h."""
        return self.prepared is not None and mistakes.is_final(
            output, self.prepared, self.work, cuda
        )

    def diagnosed(self, output: str) -> BuildError:
        """Make the error of a compiler's output."""
        from opjit.builder.diagnosis import diagnose  # late: only a build that fails needs it

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

"""From an extension's description to a published entry, through torch.utils.cpp_extension itself in a private folder.

torch gets the caller's own arguments and writes the same commands as ever; it is only told to build elsewhere and to load nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import binary, build, commands, extension, files, headers, progress, toolchain, trial
from opjit.diagnosis import diagnose
from opjit.errors import BuildError, CompileError, EntryError, OpjitError
from opjit.extension import Extension
from opjit.manifest import NAME, Manifest
from opjit.publication import Work, publish
from opjit.recipe import document_key
from opjit.store import Entry, Store
from opjit.toolchain import Compiler, Nvcc

_INLINE = ("main.cpp", "cuda.cu")  # as torch names them


class _Tools(NamedTuple):
    cxx: Compiler
    compiler: Compiler | None
    nvcc: Nvcc | None
    ninja: str


def build_extension(wanted: Extension, arguments: Mapping[str, Any], root: Store) -> Entry:
    """Build and publish; where the store cannot be written, keep the binary for this process only.

    Args:
        arguments: of torch's load, or of its load_inline.

    Raises:
        ToolMissing: a compiler or ninja is not there.
        CompileError: a source does not compile or link.
        BuildError: the tools ran and left no binary, or a source changed meanwhile.
        LoadError: the library would end the process that opens it.
    """
    tools = _tools(wanted, root)
    wanted = wanted._replace(toolchain=extension.identity(tools.cxx, tools.compiler, tools.nvcc))
    return publish(Work(wanted.name, None, lambda staged, base: _stage(wanted, arguments, tools, staged, base),
                        lambda described: wanted.shelf(root) / described.key, lambda what: _fault(wanted, what),
                        headers.unread(wanted.inputs)), root)


def _tools(wanted: Extension, root: Store) -> _Tools:
    cxx = toolchain.require_cxx(root.notes)
    cuda = wanted.archs is not None
    return _Tools(cxx, toolchain.find_compiler(root.notes) if cuda else None, toolchain.require_nvcc(root.notes) if cuda else None,
                  toolchain.require_ninja())


def _stage(wanted: Extension, arguments: Mapping[str, Any], tools: _Tools, staged: Path, base: Path) -> Manifest:
    """Compile, and leave a complete entry in staged/entry."""
    entry = staged / "entry"
    entry.mkdir(mode=0o700)
    with build.workspace(staged) as work:
        started = time.time_ns()
        progress.step("compiling")
        _run_torch_builder(wanted, arguments, tools, work, base)
        seconds = (time.time_ns() - started) / 1e9
        progress.step("checking")
        document = {**wanted.document(), "found": _found(wanted, tools, work, started)}
        if not headers.unread(wanted.inputs) and wanted.inputs_now() != wanted.inputs:
            raise _fault(wanted, "its sources changed while they were compiled; ask for it again")
        try:
            content = (work / (wanted.name if wanted.program else f"{wanted.name}.so")).read_bytes()
            (binary.machine if wanted.program else binary.inspect)(content)
        except (FileNotFoundError, EntryError) as error:
            raise _fault(wanted, f"{tools.cxx.path} reported success but left no good binary: {error}", tools.cxx.path) from None
        for name in ("build.ninja", *_INLINE):
            if (work / name).is_file():
                files.write_synced(entry / name, (work / name).read_bytes())
    library = entry / wanted.file_name
    files.write_synced(library, content)
    if wanted.program:
        library.chmod(0o755)
    described = Manifest(document_key(document), document, wanted.file_name, len(content), hashlib.sha256(content).hexdigest(),
                         {"torch": torch.__version__, "seconds": f"{seconds:.3f}"})
    files.write_synced(entry / NAME, described.dump())
    if not wanted.program:  # before it is published: nobody after this process tries again
        trial.open_in_child(str(library), wanted.name)
    return described


def _run_torch_builder(wanted: Extension, arguments: Mapping[str, Any], tools: _Tools, work: Path, base: Path) -> None:
    """Call torch's load or load_inline: build, do not load."""
    with build.without_collection():
        cpp_extension = build.import_builder()
    passed: dict[str, Any] = {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in arguments.items()}
    passed |= {"name": wanted.name, "build_directory": str(work)}
    if not wanted.sources:  # a text's place is this folder, which will be gone: messages name main.cpp
        passed["extra_cflags"] = [build.quote(f"-ffile-prefix-map={work}/="), *(passed["extra_cflags"] or ())]
        passed["extra_include_paths"] = [*(passed["extra_include_paths"] or ()), *extension.beside(arguments, wanted.texts)]
    environment: dict[str, str | None] = {"LC_ALL": "C", "PATH": f"{tools.ninja}{os.pathsep}{os.environ.get('PATH', '')}"}
    if wanted.archs:
        environment["TORCH_CUDA_ARCH_LIST"] = wanted.archs
    variables = {"_import_module_from_library": _not_from(work, cpp_extension._import_module_from_library),
                 **build.unlocked(cpp_extension, work)}
    if tools.nvcc is not None:
        variables["CUDA_HOME"] = tools.nvcc.root  # torch's own guess is wrong where nvcc is a wrapper script
    with build.torch_builder, build.changed(cpp_extension, environment, variables):
        numbered = cpp_extension.JIT_EXTENSION_VERSIONER.entries  # or torch would call the second build of a name NAME_v1
        before = numbered.pop(wanted.name, None)
        try:
            (cpp_extension.load if wanted.sources else cpp_extension.load_inline)(**passed)
        except (RuntimeError, OSError, subprocess.SubprocessError, UnicodeError) as error:
            if isinstance(error, OpjitError):
                raise
            told = build.output_of(error, work)
            if not wanted.sources:  # its flags map the folder in what is compiled; compilers' messages name it all the same
                told = told.replace(f"{work}{os.sep}", "")
            raise _named(diagnose(told, wanted.name, wanted.for_whom, base / "logs"), wanted.name, told) from None
        finally:
            progress.log_commands(work, tools.ninja)
            numbered.pop(wanted.name, None)
            if before is not None:
                numbered[wanted.name] = before


def _named(error: CompileError, name: str, told: str) -> CompileError:
    """With the name in front where the compilers tripped over it: it is a macro of their command, and no message says whence it comes."""
    if not name.isidentifier() and re.search("(?<!-D)TORCH_EXTENSION_NAME", told):
        better = re.sub(r"\W|^(?=\d)", "_", name)
        error.args = (f"the name {name!r} becomes TORCH_EXTENSION_NAME, which is a C++ identifier; use {better}\n{error}",)
    return error


def _not_from(work: Path, load: Any) -> Any:
    """torch's function that opens what it built, for everybody else's builds."""

    def load_others(name: str, folder: str, *arguments: Any) -> Any:
        return None if folder == str(work) else load(name, folder, *arguments)

    return load_others


def _found(wanted: Extension, tools: _Tools, work: Path, started: int) -> dict[str, str]:
    """The headers that only the compiler found, by content."""
    done = commands.run([os.path.join(tools.ninja, "ninja"), "-t", "deps"], cwd=work, stdout=subprocess.PIPE)
    read = {os.path.join(work, os.fsdecode(line.strip())) for line in done.stdout.splitlines() if line.startswith(b"    ")}
    trusted = extension.versioned(tools.cxx, tools.nvcc, [sysconfig.get_path("include"), sysconfig.get_path("platinclude"), str(work)])
    found = {}
    for name, path in wanted.headers_beyond(read, trusted).items():
        if os.stat(path).st_mtime_ns >= started:
            raise _fault(wanted, f"{path} changed while it was compiled; ask for it again")
        found[name] = files.digest(path)
    return found


def _fault(wanted: Extension, what: str, command: str | None = None) -> BuildError:
    return BuildError(f"{wanted.name} for {wanted.for_whom} was not built: {what}", op=wanted.name, target=wanted.for_whom, command=command)

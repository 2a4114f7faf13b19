"""Everything that depends on the internals of torch's extension builder, torch.utils.cpp_extension, which change between versions.

opjit calls its load and load_inline to write the build file, run ninja and report errors. Each build runs in a copy of torch's code, which
works in a folder of this build alone, loads nothing, and has settings that no other thread sees. So builds run side by side, and a program
may replace torch's functions, by opjit's for example.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import importlib.util
import io
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch.utils

from opjit import processes, progress
from opjit.errors import OpjitError
from opjit.recipe import toolchain
from opjit.recipe.toolchain import Compiler, Nvcc

UNIQUE = "@unique@"  # in a flag: becomes a name that no other command of the build uses
_NAME = "torch.utils.cpp_extension"
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_lock = processes.Lock()  # held while torch's code runs as a module


class Failed(Exception):
    """torch's builder failed; the message is the tools' output."""


# --- the module ---------------------------------------------------------------------------------------------------------------------------

def module() -> Any:
    """Return torch's code as a module of opjit's own, whatever a program has made of torch's module. Call its functions with `call`.

    torch needs setuptools only for setup.py's build_ext. So the code runs with an empty setuptools, which saves 0.03 to 0.15 s of a
    process's first build (tests/benchmarks/cold.py).
    """
    with _lock:
        return _own()


def torchs() -> ModuleType:
    """Return torch's module, also if a program has put another one, such as opjit.cpp_extension, in its place in sys.modules."""
    with _lock:
        named = importlib.import_module(_NAME)
        found = (named, getattr(torch.utils, "cpp_extension", None))
        return next((each for each in found if isinstance(each, ModuleType) and each.__name__ == _NAME), None) or _complete()


def original(function: str) -> Any:
    """Return torch's load or load_inline, which works with the variables of torch's module, also if a program has replaced it there."""
    return _with_globals(getattr(module(), function), vars(torchs()))


def settings() -> dict[str, Any]:
    """Return the constants of torch's module, which a program may have changed; none if it has not imported the module."""
    imported = sys.modules.get(_NAME)
    if imported is None or imported.__name__ != _NAME:
        return {}
    return {name: value for name, value in list(vars(imported).items()) if name.isupper()}


def import_quietly() -> None:
    """Import the module without its remark on a missing GPU, for a caller that needs it anyway, as torch.utils.benchmark does."""
    with _lock, _without_cuda():
        importlib.import_module(_NAME)


class _Empty(ModuleType):
    """Replaces setuptools and its modules, from whose classes torch derives its own."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


@cache
def _own() -> ModuleType:
    with _without_cuda():
        try:
            return _executed({**vars(builtins), "__import__": _import})
        except Exception:  # a version of torch that needs setuptools for more
            return _complete()


@cache
def _complete() -> ModuleType:
    with _without_cuda():
        return _executed(vars(builtins))


def _executed(names: dict[str, Any]) -> ModuleType:
    spec = PathFinder.find_spec(_NAME, torch.utils.__path__)  # no other finder: `opjit run` has one that replaces load
    assert spec is not None
    assert spec.loader is not None  # the module is a file
    made = importlib.util.module_from_spec(spec)
    made.__dict__["__builtins__"] = names
    spec.loader.exec_module(made)
    return made


def _import(name: str, *details: Any, **named: Any) -> ModuleType:
    return _Empty("setuptools") if name.partition(".")[0] == "setuptools" else builtins.__import__(name, *details, **named)


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextmanager
def _without_cuda() -> Iterator[None]:
    """During its import, torch's module looks for a GPU, and warns if there is none. Make it ask NVML, and silence the warning: asking
    CUDA takes 0.2 s, and children forked later could not use CUDA."""
    logger = logging.getLogger(_NAME)
    level, asked = logger.level, os.environ.get(_ASK_NVML)
    logger.setLevel(logging.ERROR)
    os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        logger.setLevel(level)
        if asked is None:
            os.environ.pop(_ASK_NVML, None)
        else:
            os.environ[_ASK_NVML] = asked


# --- calling it ---------------------------------------------------------------------------------------------------------------------------

def build_op(name: str, sources: Sequence[Path], objects: Sequence[Path], flags: Mapping[str, Sequence[str]], work: Path,
             compiler: Compiler, nvcc: Nvcc | None, ninja: str) -> str:
    """Build an op's library in a folder. Returns ninja's output, which holds the compilers' warnings. Raises Failed if a tool failed,
    OSError if the disk is full.

    Args:
        name: of the library.
        sources: the glue and, for CUDA, the kernel.
        objects: to link with them.
        flags: under ``"c"``, ``"cuda"`` and ``"link"``; ``"include"`` has the include folders.
    """
    environment = {
        **toolchain.NEUTRAL,
        "CC": compiler.path,  # nvcc's host compiler
        "CXX": compiler.path,  # the glue is C, so no C++ compiler is needed
        "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1",  # opjit's own flags make the complete list
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # C has one ABI
        "PYTORCH_NVCC": None,
        "NINJA_STATUS": None,
    }
    # Makes the run path that torch adds a constant; it is removed from the library.
    variables = {"TORCH_LIB_PATH": "'$$ORIGIN'", "CUDA_HOME": nvcc.root if nvcc else None}
    include = [f"-I{folder}" for folder in flags["include"]]
    return call("load", {
        "name": name,
        "sources": [str(source) for source in sources],
        "extra_cflags": [quote(flag) for flag in (*include, *flags["c"])],
        "extra_cuda_cflags": [quote(flag) for flag in for_nvcc(include, flags["cuda"])],
        "extra_ldflags": [*(quote(str(each)) for each in objects), "-shared", *map(quote, flags["link"]), "-Wl,-z,defs"],
        "build_directory": str(work),
        "with_cuda": nvcc is not None,
        "is_python_module": False,
        "is_standalone": True,  # torch builds an executable and does not load it; -shared makes it a library
    }, ninja, environment, variables)


def call(function: str, arguments: Mapping[str, Any], ninja: str, environment: Mapping[str, str | None],
         variables: Mapping[str, Any], around: AbstractContextManager[None] | None = None) -> str:
    """Call torch's load or load_inline to build in ``arguments["build_directory"]``, and load nothing. Returns ninja's output. Raises
    Failed if a tool failed, OSError if the disk is full.

    Args:
        function: ``"load"`` or ``"load_inline"``.
        ninja: folder of the executable.
        environment: changes that only torch and the compilers see; None removes a variable.
        variables: changes of torch's module during the call.
        around: a block around ninja's run, to which it may give another build.ninja.
    """
    work = Path(arguments["build_directory"])
    environment = {"PATH": f"{ninja}{os.pathsep}{os.environ.get('PATH', '')}", **environment}
    output: list[bytes] = []
    try:
        _names(environment, variables, around, output)[function](**arguments)
        return b"".join(output).decode(errors="replace")
    except (RuntimeError, OSError, subprocess.SubprocessError, UnicodeError) as error:
        if isinstance(error, OpjitError):
            raise
        raise Failed(_output_of(error, work)) from None
    finally:
        _log_commands(work, ninja)


def _names(environment: Mapping[str, str | None], variables: Mapping[str, Any],
           around: AbstractContextManager[None] | None, output: list[bytes]) -> dict[str, Any]:
    """Return the global names of a copy of torch's code, for one build: no build sees another's, nor the process's changes of them.
    ninja's output is added to `output`."""
    builder = vars(module())
    names = dict(builder)
    names |= {name: _with_globals(value, names) for name, value in builder.items()
              if isinstance(value, FunctionType) and value.__globals__ is builder}
    names |= {**variables, **_modules({name: value for name, value in {**os.environ, **environment}.items() if value is not None}, output)}
    names |= {
        "JIT_EXTENSION_VERSIONER": type(builder["JIT_EXTENSION_VERSIONER"])(),  # else torch names the second build of a name NAME_v1
        "FileLock": lambda *_: nullcontext(),  # torch's, from 2.15; flock may block, and the folder is this build's
        "_import_module_from_library": lambda *_: None,
        "verify_ninja_availability": lambda: None,  # would run ninja, which opjit has found already
        "remove_extension_h_precompiler_headers": lambda: None,  # they lie in torch's folder and are the user's
    }
    run_ninja = names["_run_ninja_build"]

    def run_within(*given: Any, **named: Any) -> None:
        with around or nullcontext():
            run_ninja(*given, **named)

    names["_run_ninja_build"] = run_within
    return names


def _log_commands(work: Path, ninja: str) -> None:
    """At DEBUG, log the commands of a build, failed or not. This starts a process."""
    if progress.logger.isEnabledFor(logging.DEBUG) and (work / "build.ninja").is_file():
        done = processes.run([os.path.join(ninja, "ninja"), "-t", "commands"], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, errors="replace")
        for command in done.stdout.splitlines():
            progress.logger.debug(command)


def _modules(environment: dict[str, str], output: list[bytes]) -> dict[str, SimpleNamespace]:
    """Return the modules ``os``, ``subprocess`` and ``sys`` for torch's builder, with this build's environment, with commands that end when
    the build is interrupted, and with text buffers in place of a missing or closed stdout and stderr, which torch flushes.

    The process's environment is shared with other threads, and C code may crash if it changes. `subprocess.run` would kill ninja only:
    ninja's compilers, each in its own process group, would continue.
    """

    def run(command: Any, **settings: Any) -> subprocess.CompletedProcess[Any]:
        if settings.get("stdout") == 1:  # verbose: torch prints the output and forgets it
            settings |= {"stdout": subprocess.PIPE, "echo": 1}
        done = processes.run(command, **{"env": environment, "limit": toolchain.time_limit(), **settings})
        if isinstance(done.stdout, bytes):
            output.append(done.stdout)
        return done

    def check_output(command: Any, **settings: Any) -> Any:
        return run(command, check=True, stdout=subprocess.PIPE, **settings).stdout

    closed = {name: io.StringIO() for name in ("stdout", "stderr") if not progress.is_open(getattr(sys, name))}
    return {"os": SimpleNamespace(**{**vars(os), "environ": environment, "getenv": environment.get}),
            "subprocess": SimpleNamespace(**{**vars(subprocess), "run": run, "check_output": check_output}),
            "sys": SimpleNamespace(**{**vars(sys), **closed})}


def _output_of(error: Exception, work: Path) -> str:
    """Return the tools' output of a failed build. Raises OSError if the disk is full, or torch could not write the build file."""
    if isinstance(error, UnicodeEncodeError):
        raise OSError(errno.EILSEQ, f"a path or flag of the build has {error.object[error.start:error.end]!a}, which this process's "
                                    f"encoding, {error.encoding}, cannot represent", str(work)) from None
    # torch decodes the output as UTF-8, but a compiler quotes a source's bytes
    output = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    toolchain.refuse_full_disk(output, work)
    return output


def for_nvcc(include: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Pass include folders to the host compiler, as nvcc splits -I at commas. It splits the word after -Xcompiler, too, unless a backslash
    precedes the comma, and passes it through a second shell."""
    flags = [*(part for flag in include for part in ("-Xcompiler", flag)), *flags]
    return [re.sub(r'([\\",])', r"\\\1", shlex.quote(flag)) if before == "-Xcompiler" else flag
            for before, flag in zip(["", *flags], flags, strict=False)]


def quote(flag: str) -> str:
    """Quote a flag for the shell, then for ninja. `UNIQUE` becomes the process ID of the command's shell."""
    return shlex.quote(flag).replace("$", "$$").replace(UNIQUE, "$$$$")

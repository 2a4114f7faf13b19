"""Calls torch.utils.cpp_extension's load and load_inline, whose internals change between versions: torch writes build.ninja, ninja runs it.

The function called is the one in torch's module, so a program that put its own there sees the call of each build. Where the program has not
imported the module (setuptools takes 0.03 to 0.15 s, tests/benchmarks/cold.py), or put opjit's functions there, it is that of a copy. The
work is always the copy's: no other thread sees the variables and the environment of a build. A lock is held while torch writes (1 ms,
6 ms where it asks the C++ compiler for its version), and none while ninja runs: builds run side by side.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import importlib.util
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch.utils

from opjit import builder, processes, progress
from opjit.builder.compile_step import CompilerFailed
from opjit.errors import OpjitError
from opjit.recipe import toolchain

UNIQUE = "@unique@"  # in a flag: becomes a name that no other command of the build uses
_NAME = "torch.utils.cpp_extension"
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_COMPILE, _REMOVE = "_jit_compile", "remove_extension_h_precompiler_headers"  # of torch's module
_lock = processes.Lock()  # held while torch's code runs as a module, or writes a build file


class NinjaFailed(CompilerFailed):
    """A command of the build file failed, or torch could not write it."""


# --- the module ---------------------------------------------------------------------------------------------------------------------------

def copy() -> ModuleType:
    """Return a module of opjit's own with torch's code. It runs with an empty setuptools, which only setup.py's build_ext needs."""
    with _lock:
        return _copy()


def torchs() -> ModuleType:
    """Return torch's module, also if a program has put another one, such as opjit.cpp_extension, in its place in sys.modules. Its remark
    on a missing GPU is not heard."""
    with _lock, _without_cuda():
        importlib.import_module(_NAME)
        return _imported() or _executed(vars(builtins))


def original(function: str) -> Any:
    """Return torch's load or load_inline, which works with the variables of torch's module, also if a program has replaced it there."""
    found = getattr(copy(), function)
    rebound = FunctionType(found.__code__, vars(torchs()), function, found.__defaults__, found.__closure__)
    rebound.__kwdefaults__ = found.__kwdefaults__
    return rebound


def settings() -> dict[str, Any]:
    """Return the constants of torch's module, which a program may have changed; none if it has not imported the module."""
    return {name: value for name, value in list(vars(_imported() or SimpleNamespace()).items()) if name.isupper()}


def _imported() -> ModuleType | None:
    """Return the program's torch.utils.cpp_extension, once a thread that is importing it has done so."""
    named = importlib.import_module(_NAME) if _NAME in sys.modules else None
    return next((each for each in (named, getattr(torch.utils, "cpp_extension", None))
                 if isinstance(each, ModuleType) and each.__name__ == _NAME), None)


class _Empty(ModuleType):
    """Replaces setuptools and its modules, from whose classes torch derives its own."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


@cache
def _copy() -> ModuleType:
    with _without_cuda():
        try:
            return _executed({**vars(builtins), "__import__": _import})
        except Exception:  # a version of torch that needs setuptools for more
            return _executed(vars(builtins))


def _executed(names: dict[str, Any]) -> ModuleType:
    spec = PathFinder.find_spec(_NAME, torch.utils.__path__)  # no other finder: `opjit run` has one that replaces load
    assert spec is not None
    assert spec.loader is not None  # the module is a file
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = names
    spec.loader.exec_module(module)
    return module


def _import(name: str, *details: Any, **named: Any) -> ModuleType:
    return _Empty("setuptools") if name.partition(".")[0] == "setuptools" else builtins.__import__(name, *details, **named)


@contextmanager
def _without_cuda() -> Iterator[None]:
    """During its import, torch's module looks for a GPU, and warns if there is none. Make it ask NVML, and silence the warning: asking
    CUDA takes 0.2 s, and children forked later could not use CUDA."""
    logger = logging.getLogger(_NAME)
    level, setting = logger.level, os.environ.get(_ASK_NVML)
    logger.setLevel(logging.ERROR)
    os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        logger.setLevel(level)
        if setting is None:
            os.environ.pop(_ASK_NVML, None)
        else:
            os.environ[_ASK_NVML] = setting


# --- calling it ---------------------------------------------------------------------------------------------------------------------------

def call(function: str, arguments: Mapping[str, Any], ninja: str, environment: Mapping[str, str | None],
         variables: Mapping[str, Any], around: AbstractContextManager[None] | None = None) -> str:
    """Build in ``arguments["build_directory"]`` by torch's load or load_inline, and load nothing. Returns ninja's output. Raises
    NinjaFailed if a tool failed, OSError if the disk is full.

    Args:
        function: ``"load"`` or ``"load_inline"``.
        ninja: folder of the executable.
        environment: changes that only torch and the compilers see; None removes a variable.
        variables: changes of torch's module during the call.
        around: a block around ninja's run, to which it may give another build.ninja.
    """
    work = Path(arguments["build_directory"])
    path = f"{ninja}{os.pathsep}{os.environ.get('PATH', '')}"
    changed: dict[str, str | None] = {**os.environ, "PATH": path, "NINJA_STATUS": None, **environment}
    set_now = {name: value for name, value in changed.items() if value is not None}
    try:
        _write_build_file(function, arguments, set_now, variables)
        with around or nullcontext():
            return _run_ninja(work, ninja, set_now, bool(arguments.get("verbose")))
    except (RuntimeError, OSError, subprocess.SubprocessError, UnicodeError) as error:
        if isinstance(error, OpjitError):
            raise
        raise NinjaFailed(_output_of(error, work)) from None


def _write_build_file(function: str, arguments: Mapping[str, Any], environment: dict[str, str], variables: Mapping[str, Any]) -> None:
    """Let torch write build.ninja, and inline sources."""
    def check_output(command: Any, **more: Any) -> Any:
        return processes.run(command, check=True, stdout=subprocess.PIPE, **{"env": environment, **more}).stdout

    own, place = vars(copy()), Path(arguments["build_directory"], "build.ninja")
    place.unlink(missing_ok=True)  # of an attempt with NVRTC
    changes = {
        **variables,
        "os": SimpleNamespace(**{**vars(os), "environ": environment, "getenv": environment.get}),
        "subprocess": SimpleNamespace(**{**vars(subprocess), "check_output": check_output}),
        "JIT_EXTENSION_VERSIONER": type(own["JIT_EXTENSION_VERSIONER"])(),  # else torch names the second build of a name NAME_v1
        "FileLock": lambda *_: nullcontext(),  # torch's, from 2.15; flock may block, and the folder is this build's
        "_run_ninja_build": lambda *_, **__: None,
        "_import_module_from_library": lambda *_: None,
        "verify_ninja_availability": lambda: None,  # would run ninja, which opjit has found already
        _REMOVE: lambda: None,  # they lie in torch's folder and are the user's
    }
    with _lock, _changed(own, changes):
        public = vars(_imported() or SimpleNamespace())
        if callable(public.get(function)) and _COMPILE in public:
            with _changed(public, {name: _in_this_thread(own[name], public[name]) for name in (_COMPILE, _REMOVE) if name in public}):
                builder.torch_call.original = own[function]  # for opjit's own functions, if the program put them there
                try:
                    public[function](**arguments)
                finally:
                    del builder.torch_call.original
        if not place.exists():
            own[function](**arguments)


def _in_this_thread(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `ours` in this thread, and `theirs` in all others."""
    thread = threading.get_ident()
    return lambda *args, **named: (ours if threading.get_ident() == thread else theirs)(*args, **named)


@contextmanager
def _changed(names: dict[str, Any], changes: Mapping[str, Any]) -> Iterator[None]:
    """Give a module's variables other values during the block."""
    before = {name: names[name] for name in changes if name in names}
    names.update({name: changes[name] for name in before})
    try:
        yield
    finally:
        names.update(before)


def _run_ninja(work: Path, ninja: str, environment: Mapping[str, str], verbose: bool) -> str:
    """Run ninja as torch does, and return its output. Raises NinjaFailed if a tool failed. An interrupt ends ninja's compilers, too."""
    jobs = environment.get("MAX_JOBS", "")
    done = processes.run([os.path.join(ninja, "ninja"), "-v", *(["-j", jobs] if jobs.isdigit() else [])], cwd=work, env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, echo=1 if verbose else None, limit=toolchain.time_limit())
    output = str(done.stdout, errors="replace")
    for command in re.findall(r"^\[\d+/\d+\] (.*)", output, re.MULTILINE):
        progress.logger.debug("%s", command)
    if done.returncode:
        toolchain.refuse_full_disk(output, work)
        raise NinjaFailed(output)
    return output


def _output_of(error: Exception, work: Path) -> str:
    """Return the tools' output of a failed build. Raises OSError if the disk is full, or torch could not write the build file."""
    if isinstance(error, UnicodeEncodeError):
        raise OSError(errno.EILSEQ, f"a path or flag of the build has {error.object[error.start:error.end]!a}, which this process's "
                                    f"encoding, {error.encoding}, cannot represent", str(work)) from None
    # torch decodes the output as UTF-8, but a compiler quotes a source's bytes
    output = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    toolchain.refuse_full_disk(output, work)
    return output


def quote(flag: str) -> str:
    """Quote a flag for the shell, then for ninja. `UNIQUE` becomes the process ID of the command's shell."""
    return shlex.quote(flag).replace("$", "$$").replace(UNIQUE, "$$$$")

"""Call load and load_inline of torch.utils.cpp_extension, although their internals change between
versions: torch writes build.ninja, and ninja runs it.

opjit calls the function in torch's module, so a program that patched it sees every build. It calls
functions with global names that belong to this build, for example `os` with the environment.
Therefore builds run side by side, and other threads do not see a change. If a program has not
imported torch's module, setuptools is not imported, which would cost 0.03 to 0.15 s
(tests/benchmarks/cold.py).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch.utils

from opjit import builder, processes, progress
from opjit.builder import budget
from opjit.builder.compile_step import CompilerFailed
from opjit.errors import OpjitError
from opjit.recipe import compilers
from opjit.recipe.reports import without_attempts

UNIQUE = "@unique@"  # in a flag: becomes a name that no other command of the build uses
_NAME = "torch.utils.cpp_extension"
_COMPILES = re.compile(r"^build (\S+): (compile|cuda_compile) ", re.MULTILINE)
_OUTPUT = "ninja.output"
_SHARED = "shared.ninja"  # build.ninja, with compilers that wait for their shares of the machine
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_lock = processes.Lock()  # held while torch's code runs as a module


class NinjaFailed(CompilerFailed):
    """A command of the build file failed, or torch could not write it."""


def private_copy() -> ModuleType:
    """Return a private module with torch's code.

    It runs with an empty setuptools, which only setup.py's build_ext needs.
    """
    with _lock:
        return _make_copy()


def torch_module() -> ModuleType:
    """Return torch's module, even if a program has replaced it in sys.modules, for example by
    opjit.cpp_extension.
    """
    with _lock, _without_cuda():
        importlib.import_module(_NAME)
        return _imported() or _executed(vars(builtins))


def original(function: str) -> Any:
    """Return torch's load or load_inline, which works with the variables of torch's module, even
    if a program has replaced it there.
    """
    return _rebound(getattr(private_copy(), function), vars(torch_module()))


def _rebound(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a function that has other global names."""
    rebound = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound


def settings() -> dict[str, Any]:
    """Return the constants of torch's module, which a program may have changed; none if it has not imported the module."""
    return {
        name: value
        for name, value in list(vars(_imported() or SimpleNamespace()).items())
        if name.isupper()
    }


def _imported() -> ModuleType | None:
    """Return the program's torch.utils.cpp_extension, once a thread that is importing it has done so."""
    named = importlib.import_module(_NAME) if _NAME in sys.modules else None
    return next(
        (
            each
            for each in (named, getattr(torch.utils, "cpp_extension", None))
            if isinstance(each, ModuleType) and each.__name__ == _NAME
        ),
        None,
    )


class _Empty(ModuleType):
    """Replace setuptools and its modules, because torch derives classes from their classes."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


@cache
def _make_copy() -> ModuleType:
    with _without_cuda():
        try:
            return _executed({**vars(builtins), "__import__": _import})
        except Exception:  # a version of torch that needs setuptools for more
            return _executed(vars(builtins))


def _executed(names: dict[str, Any]) -> ModuleType:
    spec = PathFinder.find_spec(
        _NAME, torch.utils.__path__
    )  # no other finder: `opjit run` has one that replaces load
    assert spec is not None
    assert spec.loader is not None  # the module is a file
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = names
    spec.loader.exec_module(module)
    return module


def _import(name: str, *details: Any, **named: Any) -> ModuleType:
    return (
        _Empty("setuptools")
        if name.partition(".")[0] == "setuptools"
        else builtins.__import__(name, *details, **named)
    )


@contextmanager
def _without_cuda() -> Iterator[None]:
    """During its import, torch's module looks for a GPU and warns if this machine lacks one.

    Make it query NVML, and silence the warning: a query of CUDA costs 0.2 s, and children forked
    later could not use CUDA.
    """
    logger = logging.getLogger(_NAME)
    level = logger.level
    is_set = _ASK_NVML in os.environ
    logger.setLevel(logging.ERROR)
    os.environ.setdefault(_ASK_NVML, "1")
    try:
        yield
    finally:
        logger.setLevel(level)
        if not is_set:
            os.environ.pop(_ASK_NVML, None)


def call(
    function: str,
    arguments: Mapping[str, Any],
    ninja: str,
    environment: Mapping[str, str | None],
    variables: Mapping[str, Any],
    needs: tuple[int, int],
    around: AbstractContextManager[None] | None = None,
) -> str:
    """Build in ``arguments["build_directory"]`` by torch's load or load_inline, with `variables` in torch's module, and load nothing.
    Returns ninja's output. Only torch and the compilers see `environment`, where None removes a variable. `needs` are the bytes that the
    compiler of C or C++ takes for a file, and nvcc. `around` is a block around ninja's run, to which it may give another build.ninja.
    Raises NinjaFailed if a tool failed, OSError if the disk is full."""
    work = Path(arguments["build_directory"])
    output = []
    path = os.pathsep.join(
        filter(None, (os.environ.get("PATH"), ninja))
    )  # last, because the folder may also contain another compiler
    changed: dict[str, str | None] = {
        **os.environ,
        "PATH": path,
        "NINJA_STATUS": None,
        **environment,
    }
    set_now = {name: value for name, value in changed.items() if value is not None}

    def run(*_: Any, **__: Any) -> None:
        with around or nullcontext():
            output.append(run_ninja(work, ninja, needs, set_now, bool(arguments.get("verbose"))))

    names = _names({**variables, "_run_ninja_build": run}, set_now)
    builder.torch_call.names = names
    public = vars(_imported() or SimpleNamespace())
    for name in (
        "_jit_compile",
        "remove_extension_h_precompiler_headers",
    ):  # which torch's load and load_inline go on to
        theirs = public.get(name)
        if theirs is not None and theirs.__module__ != __name__:
            public[name] = _forward_to_build(name, theirs)
    try:
        public.get(function, names[function])(**arguments)
        if not output:  # the program's function did not go on to torch's
            names[function](**arguments)
    except UnicodeEncodeError as error:
        raise OSError(
            errno.EILSEQ,
            f"a path or flag of the build has {error.object[error.start : error.end]!a}, which this process's "
            f"encoding, {error.encoding}, cannot represent",
            str(work),
        ) from None
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        if isinstance(error, OpjitError):
            raise
        compilers.refuse_full_disk(str(error), work)
        raise NinjaFailed(str(error)) from None
    finally:
        del builder.torch_call.names
    return output[0]


def _names(variables: Mapping[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Return the names of torch's module for one build: its functions see these, and no other thread does."""

    def check_output(command: Any, **more: Any) -> Any:
        return processes.run(
            command, check=True, stdout=subprocess.PIPE, **{"env": environment, **more}
        ).stdout

    own = vars(private_copy())
    names: dict[str, Any] = {
        **own,
        **variables,
        "os": SimpleNamespace(**{**vars(os), "environ": environment, "getenv": environment.get}),
        "subprocess": SimpleNamespace(**{**vars(subprocess), "check_output": check_output}),
        "JIT_EXTENSION_VERSIONER": type(
            own["JIT_EXTENSION_VERSIONER"]
        )(),  # else torch names the second build of a name NAME_v1
        "FileLock": lambda *_: (
            nullcontext()
        ),  # torch's, from 2.15; flock may block, and the folder is this build's
        "_import_module_from_library": lambda *_: None,
        "verify_ninja_availability": lambda: None,  # would run ninja, which opjit has found already
        "remove_extension_h_precompiler_headers": lambda: (
            None
        ),  # they are in torch's folder and belong to the user
    }
    rebound = {
        name: _rebound(value, names)
        for name, value in names.items()
        if getattr(value, "__globals__", None) is own
    }
    names.update(rebound)
    return names


def _forward_to_build(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that continues with the function of the thread's build, if it builds."""
    return lambda *args, **named: getattr(builder.torch_call, "names", {name: theirs})[name](
        *args, **named
    )


def run_ninja(
    work: Path,
    ninja: str,
    needs: tuple[int, int],
    environment: Mapping[str, str],
    verbose: bool = False,
    objects: Sequence[str] = (),
) -> str:
    """Run ninja for some objects or for all, and return its output.

    Each compiler waits for its share of the machine; `needs`: see `call`. Raises NinjaFailed if a
    tool failed. An interrupt also ends ninja's compilers.
    """
    text = (work / "build.ninja").read_text("utf-8", "surrogateescape")
    rules = [rule for out, rule in _COMPILES.findall(text) if not objects or out in objects]
    program = [os.path.join(ninja, "ninja"), "-v", "-j", str(budget.width(budget.C_JOB))]
    launchers = [shlex.join(budget.launcher(need)) for need in needs]
    with (
        budget.share(needs["cuda_compile" in rules])
        if len(rules) < 2
        else nullcontext(launchers[0]) as waits
    ):
        if waits:
            for name, words in zip(("cxx", "nvcc"), launchers, strict=True):
                text = text.replace(f"\n{name} = ", f"\n{name} = {words.replace('$', '$$')} ", 1)
            (work / _SHARED).write_text(
                text, "utf-8", "surrogateescape"
            )  # people read the names of torch
            program += ["-f", _SHARED]
        done = processes.run(
            [*program, *objects],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            limit=compilers.time_limit(),
        )
    output = str(done.stdout, errors="replace")
    with open(work / _OUTPUT, "a", encoding="utf-8", errors="replace") as log:
        log.write(output)
    output = without_attempts(output)
    for words in launchers if waits else ():
        output = output.replace(f"{words} ", "")
    if verbose:
        print(output, end="", flush=True)
    for command in re.findall(r"^\[\d+/\d+\] (.*)", output, re.MULTILINE):
        progress.logger().debug("%s", command)
    if done.returncode:
        compilers.refuse_full_disk(output, work)
        raise NinjaFailed(output)
    return output


def output_of(work: Path) -> str:
    """Return what ninja has printed so far in the folder of a build."""
    place = work / _OUTPUT
    return place.read_text("utf-8", "surrogateescape") if place.is_file() else ""


def quote(flag: str) -> str:
    """Quote a flag for the shell, then for ninja. `UNIQUE` becomes the process ID of the command's shell."""
    return shlex.quote(flag).replace("$", "$$").replace(UNIQUE, "$$$$")

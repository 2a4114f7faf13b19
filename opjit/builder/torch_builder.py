"""Let load and load_inline of torch.utils.cpp_extension build, although their internals change between versions. An op's load writes
build.ninja and runs ninja. For an extension, it describes the build, and opjit runs the commands.

opjit calls the function in torch's module, so a program that patched it sees every build. Each
build has a private copy of the module, whose functions see the environment of this build and note
it in place of running ninja. Therefore builds run side by side, and other threads do not see a
change. If a program has not imported torch's module, setuptools is not imported, which would cost
0.03 to 0.15 s (tests/benchmarks/cold.py).
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch.utils

from opjit import builder, processes
from opjit.builder import ninja
from opjit.builder.compile_step import CommandFailed
from opjit.errors import OpjitError
from opjit.recipe import compilers, recorder

_NAME = "torch.utils.cpp_extension"
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_lock = processes.Lock()  # held while torch's code runs as a module


@dataclass(frozen=True)
class CompiledSource:
    """A source, and the name of its object file in the folder of the build."""

    source: str
    out: str
    by_nvcc: bool


@dataclass(frozen=True)
class TorchBuild:
    """The build of a library, as torch describes it in build.ninja. Flags are words."""

    compilations: tuple[CompiledSource, ...]
    cxx_flags: list[str]
    nvcc_flags: list[str]
    link_flags: list[str]
    library: str

    def compile_command(
        self, compilation: CompiledSource, compiler: Sequence[str], first: Sequence[str] = ()
    ) -> list[str]:
        """Return the command of a compilation. The flags `first` come before torch's."""
        flags = self.nvcc_flags if compilation.by_nvcc else self.cxx_flags
        out = compilation.out
        # As in torch's rule, because a flag of the user may count on it.
        lists = ["-MD" if compilation.by_nvcc else "-MMD", "-MF", f"{out}.d"]
        return [*compiler, *lists, *first, *flags, "-c", compilation.source, "-o", out]

    def link_step(self, compiler: Sequence[str], work: Path) -> ninja.ToolCommand:
        """Return the step that links the object files in the folder of the build."""
        objects = [compilation.out for compilation in self.compilations]
        command = [*compiler, *objects, *self.link_flags, "-o", self.library]
        needs = [work / each for each in objects]
        return ninja.ToolCommand(command, work / self.library, work, needs)


def private_copy() -> ModuleType:
    """Return a new private module with torch's code, in 1 to 5 ms.

    It runs with an empty setuptools, which only setup.py's build_ext needs.
    """
    with _lock, _without_cuda():
        try:
            return _executed(
                {
                    **vars(builtins),
                    "__import__": lambda name, *details, **named: (
                        _Empty("setuptools")
                        if name.partition(".")[0] == "setuptools"
                        else __import__(name, *details, **named)
                    ),
                }
            )
        except Exception:  # a version of torch that needs setuptools for more
            return _executed(vars(builtins))


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
    copied = getattr(private_copy(), function)
    return FunctionType(
        copied.__code__, vars(torch_module()), function, copied.__defaults__, copied.__closure__
    )


def settings() -> dict[str, Any]:
    """Return the constants of torch's module, which a program may have changed; none if it has not imported the module."""
    names = list(vars(_imported() or SimpleNamespace()).items())
    found = {name: value for name, value in names if name.isupper()}
    # With it, torch names the second build of a name NAME_v1.
    found.pop("JIT_EXTENSION_VERSIONER", None)
    return found


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


def _executed(names: dict[str, Any]) -> ModuleType:
    # The other finders are not asked, because `opjit run` has one that replaces load.
    spec = PathFinder.find_spec(_NAME, torch.utils.__path__)
    assert spec is not None
    assert spec.loader is not None  # the module is a file
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = names
    spec.loader.exec_module(module)
    return module


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


def run_build(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str | None],
    variables: Mapping[str, Any],
) -> str:
    """Let torch's load write build.ninja in ``arguments["build_directory"]`` and run ninja there, and return the output of the tools.

    Only torch and the tools see the `environment`, where None removes a variable, and only torch the `variables` of its module. Raises
    CommandFailed if a command fails, OSError if the disk is full.
    """
    copied = vars(private_copy())
    work = Path(arguments["build_directory"])
    surroundings = _surroundings(environment)
    del surroundings["_run_ninja_build"]
    outputs = list[str]()

    def run_ninja(command: Sequence[str], *, env: dict[str, str], **_: Any) -> None:
        outputs.append(ninja.run_ninja(command, work, env, [work / recorder.LOG]))

    surroundings["subprocess"].run = run_ninja
    # torch flushes the streams, which a program may have closed.
    surroundings["sys"] = SimpleNamespace(
        **{**vars(sys), "stdout": io.StringIO(), "stderr": io.StringIO()}
    )
    copied.update(variables, **surroundings)
    _call("load", arguments, copied, outputs)
    return outputs[-1]


def describe_build(
    function: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str | None],
    variables: Mapping[str, Any],
) -> TorchBuild:
    """Return the build in ``arguments["build_directory"]`` for which torch's load or load_inline writes build.ninja there.

    Only torch sees the `variables` of its module, and `environment`, where None removes a variable.
    Raises CommandFailed if torch refuses the build, OSError if the disk is full.
    """
    copied = vars(private_copy())
    write = copied["_write_ninja_file"]
    described = list[TorchBuild]()

    def note(**inputs: Any) -> None:
        write(**inputs)  # for people
        described.append(_torch_build(**inputs))

    copied.update(variables, **_surroundings(environment), _write_ninja_file=note)
    _call(function, arguments, copied, described)
    return described[-1]


def _call(
    function: str, arguments: Mapping[str, Any], copied: dict[str, Any], done: Sequence[object]
) -> None:
    """Call the program's load or load_inline, with the inner functions of a copied module, and torch's if `done` is still empty.

    Raises CommandFailed if torch refuses the build, OSError if the disk is full.
    """
    builder.torch_call.names = copied
    public = vars(_imported() or SimpleNamespace())
    for name in ("_jit_compile", "remove_extension_h_precompiler_headers"):
        # torch's load and load_inline call these.
        theirs = public.get(name)
        if theirs is not None and theirs.__module__ != __name__:
            public[name] = _forward_to_build(name, theirs)
    work = arguments["build_directory"]
    try:
        public.get(function, copied[function])(**arguments)
        if not done:  # the program's function did not call torch's
            copied[function](**arguments)
    except UnicodeEncodeError as error:
        raise OSError(
            errno.EILSEQ,
            f"a path or flag of the build has {error.object[error.start : error.end]!a}, which this process's "
            f"encoding, {error.encoding}, cannot represent",
            work,
        ) from None
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        if isinstance(error, OpjitError):
            raise
        compilers.refuse_full_disk(str(error), Path(work))
        raise CommandFailed(str(error)) from None
    finally:
        del builder.torch_call.names


def _surroundings(environment: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the names that replace a copied module's: it sees the environment, and builds nothing."""
    changed = {**os.environ, **environment}
    given = {name: value for name, value in changed.items() if value is not None}

    def check_output(command: Any, **more: Any) -> Any:
        settings = {"env": given, **more}
        return processes.run(command, check=True, stdout=subprocess.PIPE, **settings).stdout

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {
        "os": SimpleNamespace(**{**vars(os), "environ": given, "getenv": given.get}),
        "subprocess": SimpleNamespace(**{**vars(subprocess), "check_output": check_output}),
        "FileLock": nullcontext,  # torch's, from 2.14; flock may block, and the folder is this build's
        "verify_ninja_availability": nothing,
        "_run_ninja_build": nothing,
        "_import_module_from_library": nothing,
        # They are in torch's folder and belong to the user.
        "remove_extension_h_precompiler_headers": nothing,
    }


def _torch_build(
    *,
    sources: Sequence[str],
    objects: Sequence[str],
    with_cuda: bool,
    cflags: Sequence[str],
    cuda_cflags: Sequence[str] | None,
    ldflags: Sequence[str],
    library_target: str,
    **_: Any,
) -> TorchBuild:
    """Return a build by the arguments of the function with which torch writes build.ninja."""
    if len(set(objects)) < len(objects):
        raise CommandFailed(
            f"two of the sources {', '.join(sources)} have the same name, so they would have one object file; rename one"
        )
    compilations = tuple(
        CompiledSource(os.path.abspath(source), out, with_cuda and source.endswith((".cu", ".cuh")))
        for source, out in zip(sources, objects, strict=True)
    )
    return TorchBuild(
        compilations, _words(cflags), _words(cuda_cflags or ()), _words(ldflags), library_target
    )


def _words(flags: Sequence[str]) -> list[str]:
    """Return the words of flags that are quoted for a shell, then for ninja."""
    text = re.sub(r"\$([$ :])", r"\1", " ".join(flags))
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CommandFailed(f"{error} in the flags {text}") from None


def _forward_to_build(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that continues with the function of the thread's build, if it builds."""
    return lambda *args, **named: getattr(builder.torch_call, "names", {name: theirs})[name](
        *args, **named
    )


def quote(flag: str) -> str:
    """Quote a flag for the shell, then for ninja, as torch's functions require."""
    return shlex.quote(flag).replace("$", "$$")


def quoted(flags: Iterable[str]) -> list[str]:
    return list(map(quote, flags))

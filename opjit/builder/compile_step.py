"""Shared by all compilations: the tools, their failure, and the choice of the compiler for CUDA
code.
"""

import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from opjit import progress
from opjit.errors import BuildError, ToolMissing
from opjit.recipe import compilers, toolchain
from opjit.recipe.compilers import DeviceCompilerInfo, Nvrtc
from opjit.recipe.nvcc_flags import NvccOnly
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import BuildTools

_Result = TypeVar("_Result")
# In a path, torch escapes only spaces for build.ninja, and nvcc misreads quotes and backslashes.
_UNWRITABLE = r"[$:|\"`\\\x00-\x1f\x7f\ud800-\udfff]"


class CompilerFailed(Exception):
    """A compiler refused the code. The message is its output."""


class CommandFailed(CompilerFailed):
    """A command of a build failed, or torch could not describe the build."""


class LayoutDiffers(Exception):
    """The host's and the device's part of CUDA code have different layouts of a type. The message is the compiler's output."""


@contextmanager
def workspace(staged: Path) -> Iterator[Path]:
    """Open the compilers' folder: in the staging folder, unless torch cannot write that path into a build file."""
    if re.search(_UNWRITABLE, str(staged)):
        with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
            yield Path(folder)
    else:
        work = staged / "build"
        work.mkdir(mode=0o700)
        yield work


def run_tool(command: Sequence[str], work: Path) -> str:
    """Run a compiler or its like in a folder, and return its output; see `run_compiler`. Raises CompilerFailed, or OSError if the disk is
    full."""
    done = compilers.run_compiler(command, work)
    output = done.stdout
    if done.returncode < 0:
        output += (
            f"\n{command[0]} was killed by signal {-done.returncode}; try again, with more memory "
            "if it needs it"
        )
    if done.returncode:
        compilers.refuse_full_disk(output, work)
        raise CompilerFailed(output)
    return output


def by_nvrtc_or_nvcc(
    name: str,
    tools: BuildTools,
    by_nvrtc: Callable[[Nvrtc], _Result],
    by_nvcc: Callable[[], _Result],
    diagnose: Callable[[str], BuildError],
) -> tuple[_Result, str]:
    """Compile with NVRTC, or else with nvcc.

    Returns the result, and a remark on the compiler for the manifest, empty without either. Raises
    ToolMissing if only nvcc can compile it and nvcc is missing.
    """
    reason = ""
    if tools.nvrtc is not None:
        try:
            return by_nvrtc(tools.nvrtc), f"NVRTC {tools.nvrtc.version}"
        except NvccOnly as refusal:
            reason = str(refusal)
            if tools.nvcc is None:
                other = toolchain.is_cross(machine := tools.compiler.machine.partition("-")[0])
                way = (
                    f"build it on a machine with {machine}, as nvcc here does not"
                    if other
                    else toolchain.install_nvcc()
                )
                raise ToolMissing("nvcc", f"{name} needs nvcc, as {reason}; {way}") from None
        except LayoutDiffers as failed:  # nvcc would accept it, and kernels would read garbage
            raise diagnose(str(failed)) from None
        except CompilerFailed as failed:
            if tools.nvcc is None:
                raise diagnose(str(failed)) from None
            first = next(
                (line.strip() for line in str(failed).splitlines() if "error" in line), "no message"
            )
            reason = f"NVRTC or the C++ compiler refused it: {first}"
        progress.log(f"{name} is compiled by nvcc, as {reason}")
    return (
        by_nvcc(),
        f"nvcc {tools.nvcc.build}{f', as {reason}' if reason else ''}" if tools.nvcc else "",
    )


def compile_by_own(
    recipe: Recipe, sources: Sequence[Path], work: Path, own: DeviceCompilerInfo
) -> tuple[list[Path], str]:
    """Compile an op's kernel and its author's other sources. Returns the object files, and the compiler's output. Raises CompilerFailed if
    the compiler refused a source, BuildError if it left no object file."""
    objects = []
    output = ""
    for source in sources:
        compiled = work / f"{source.stem}.o"
        places = {
            **recipe.placeholders(work),
            "source": str(source),
            "object": str(compiled),
        }
        command = [
            own.path,
            *(
                flag.format(**places, path=folder)
                for flag in recipe.flags.device
                for folder in (recipe.include_path if "{path}" in flag else ("",))
            ),
        ]
        try:
            output += run_tool(command, work)
        except CompilerFailed as failed:
            told = f"FAILED: {command[-1]}\n{shlex.join(command)}\n{failed}"
            raise CommandFailed(told) from None
        if not compiled.is_file():
            of = recipe.target.backend.name
            raise recipe.fault(
                f"{own.path} reported success but left no object file, {{object}}, in the flags of the backend {of}",
                shlex.join(command),
            )
        objects.append(compiled)
    return objects, output

"""Kernels that a device's own compiler compiles, before torch's builder compiles the glue and links both."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from opjit.builder.compile_step import CompilerFailed
from opjit.errors import BuildError
from opjit.recipe import toolchain
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import Own


def compile_kernels(recipe: Recipe, sources: Sequence[Path], work: Path, own: Own) -> tuple[list[Path], str]:
    """Compile an op's kernel and its author's other sources. Returns the object files, and the compiler's output. Raises CompilerFailed if
    the compiler refused a source, BuildError if it was killed, or left no object file or no list of the files that it read."""
    objects, output = [], ""
    for source in sources:
        compiled, listed = work / f"{source.stem}.o", work / f"{source.stem}.deps"
        places = {**recipe.places(work), "source": str(source), "object": str(compiled), "dependencies": str(listed)}
        command = [own.path, *(flag.format(**places, path=folder) for flag in recipe.flags.device
                               for folder in (recipe.include_path if "{path}" in flag else ("",)))]
        done = toolchain.run(command, work)
        if done.returncode < 0:
            raise _fault(recipe, command, f"was killed by signal {-done.returncode}; try again, with more memory if it needs it")
        if done.returncode:
            toolchain.refuse_full_disk(done.stdout, work)
            raise CompilerFailed(f"FAILED: {source.name}\n{shlex.join(command)}\n{done.stdout}")  # as ninja reports it
        for path, what in ((compiled, "object file, {object}"), (listed, "list of the files that it read, {dependencies}")):
            if not path.is_file():
                of = recipe.target.backend.name
                raise _fault(recipe, command, f"reported success but left no {what}, in the flags of the backend {of}")
        objects.append(compiled)
        output += done.stdout
    return objects, output


def _fault(recipe: Recipe, command: Sequence[str], what: str) -> BuildError:
    return BuildError(f"{recipe} was not built: {command[0]} {what}", op=recipe.schema.qualified, target=str(recipe.target),
                      command=shlex.join(command))

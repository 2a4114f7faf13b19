"""Compiler warnings, kernel resource usage, and commands for editors."""

import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from opjit import batch, request, resources
from opjit.backends.targets import Target
from opjit.errors import CompileWarning, OpjitError
from opjit.operators.op import Op
from opjit.recipe import toolchain
from opjit.store.store import default_store
from opjit.wanted import describe, target_of


def show_usage(ops: Sequence[Op], target: Target) -> None:
    """Print what the CUDA kernels of ops take of a GPU."""
    from rich.console import Console

    request.import_builder()
    from opjit.builder import build, kernel_usage

    store = default_store()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)  # the build gives them
        usages = [
            usage for op in ops for usage in build.usage_of(describe(op, target, store), store)
        ]
    Console(stderr=True, highlight=False).print(
        kernel_usage.table(usages),
        "smem: bytes of shared memory that the kernel declares; spill: bytes stored and loaded",
    )


def show_warnings(ops: Sequence[Op], targets: Sequence[Target]) -> None:
    """Compile ops with -Wall and -Wextra, and print the warnings, which later builds of this command then leave out."""
    request.import_builder()
    from opjit.builder import build

    store = default_store()
    for pair in batch.pairs(ops, targets):
        build.compile_with_warnings(describe(*pair, store), store)
    warnings.simplefilter("ignore", CompileWarning)


def show_all_warnings(ops: Sequence[Op], device: str | None) -> None:
    """Print the warnings for a device, by default for each that an op has a kernel for, as far as the ops compile."""
    with suppress(OpjitError):  # the checks report an op that does not compile
        show_warnings(
            ops,
            [target_of(device, None)] if device else batch.targets_of([], default_store()),
        )


def write_commands(ops: Sequence[Op], targets: Sequence[Target], place: Path) -> None:
    """Write a compile_commands.json with the commands that compile the sources of ops."""
    listed = []
    for op, target in batch.pairs(ops, targets):
        flags = op.declaration.flags(target)
        source = op.declaration.source(target.backend)
        folder = str(source.parent)
        compiler = toolchain.require_compiler(None).path
        words = ["nvcc", *flags.cuda] if target.backend.uses_nvcc else [compiler, *flags.c]
        words += [f"-I{path}" for path in (folder, resources.folder("kernels_c"), *flags.include)]
        for file in (str(source), *flags.sources):
            listed.append({"directory": folder, "file": file, "arguments": [*words, "-c", file]})
    place.write_text(json.dumps(listed, indent=1), "utf-8")

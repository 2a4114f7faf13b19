"""The commands that list, build and explain ops, and `opjit doctor`."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import UsageError, echo, option

from opjit import progress
from opjit.cli.help import (
    FILE,
    FOLDER,
    PrintJson,
    archs,
    archs_option,
    device_option,
    flag,
    interruptible,
    json_option,
    ops,
    ops_argument,
    subcommand,
)
from opjit.environment import is_on
from opjit.errors import OpjitError, UnknownOp
from opjit.progress import readable, tally

if TYPE_CHECKING:  # help and completion don't import torch
    from opjit.backends.targets import Target
    from opjit.operators.op import Op


@subcommand("opjit demo", declares=False)
def demo() -> None:
    """Build, load, check and time an op on every device."""
    from rich.console import Console

    from opjit.author.demo import show

    show(Console(highlight=False), Console(stderr=True))


@subcommand("opjit list", "opjit list --json", name="list")
@json_option
def list_ops(print_json: PrintJson) -> None:
    """List the declared ops with their backends and schemas."""
    from opjit.catalog import registry

    registry.search()
    ops = registry.all_ops()
    if print_json is not None:
        print_json(
            [
                {
                    "op": op.qualified,
                    "schema": op.schema.text,
                    "backends": op.backends(),
                    "folder": op.folder,
                }
                for op in ops
            ]
        )
        return
    for op in ops:
        backends = ", ".join(op.backends())
        # torch prints the 17 digits of a default that 1e-6 needs not.
        schema = re.sub(
            r"\d\.\d{16,}(e-?\d+)?",
            lambda number: repr(float(number[0])),
            op.schema.text.partition("::")[2],
        )
        line = f"{op.qualified}  [{backends}]  {schema}"
        echo(readable(line) if sys.stdout.isatty() else line)


@subcommand(
    "opjit get allreduce",
    "opjit get ./scale_add --arch sm_90",
    "opjit get ./scale_add allreduce --build-directory build --name my_ops",
)
@ops_argument("OP...")
@device_option
@archs_option(
    "Build for these architectures, separated by commas (sm_90,x86-64-v3). Nothing is loaded."
)
@option(
    "--build-directory",
    type=FOLDER,
    help="Write an op package for opjit.load_library into this directory. Nothing is loaded.",
)
@option(
    "--name",
    help="Name of the op package. Default: derived from the first op, the architecture and the content.",
)
@flag(
    "--debug",
    "Build for gdb, cuda-gdb and profilers. Programs with OPJIT_DEBUG=1 load this binary.",
)
@flag("-W", "all_warnings", "Print the warnings of -Wall -Wextra.")
@option(
    "--compile-commands",
    type=FILE,
    help="Write the compilers' commands into this file, compile_commands.json, for editors and clang-tidy.",
)
@json_option
@interruptible()
def get(
    ops: tuple[str, ...],
    device: str | None,
    archs: list[str],
    build_directory: Path | None,
    name: str | None,
    debug: bool,
    all_warnings: bool,
    compile_commands: Path | None,
    print_json: PrintJson,
) -> None:
    """Build ops, and print the paths of their binaries.

    OP is the name or the directory of an op. Ops that are cached are not built again. With
    --build-directory, the command prints the path of the op package. With --name, it also prints the
    path of a shared library for torch.ops.load_library, which works without opjit and contains all
    architectures of --arch.

    With -v, the command also prints registers, shared memory, stack and spills of each CUDA kernel.

    Debug builds are cached separately, and are never added to a wheel or a remote cache. To use one, run
    OPJIT_DEBUG=1 gdb --args python program.py.
    """
    from opjit.author import diagnostics
    from opjit.catalog import arguments
    from opjit.wanted import target_of

    if debug:
        os.environ["OPJIT_DEBUG"] = "1"
    if name is not None and build_directory is None:
        raise UsageError(
            "--name needs --build-directory DIR, because it names the op package in that directory"
        )
    targets = [target_of(device, each) for each in archs] or [target_of(device, None)]
    chosen = [op for text in ops for op in arguments.ops(text)]
    if compile_commands is not None:
        diagnostics.write_commands(chosen, targets, compile_commands)
    if all_warnings:
        diagnostics.show_warnings(chosen, targets)
    for each in targets:
        if is_on("OPJIT_VERBOSE") and each.backend.uses_nvcc:
            diagnostics.show_usage(chosen, each)
    found = _build_entries(chosen, targets, load=not archs)  # builds when it is iterated
    if build_directory is not None:
        found = _packages(chosen, build_directory, device, archs, name)
    if print_json is not None:
        print_json(list(found))
        return
    for row in found:
        echo(row["path"])


def _packages(
    ops: Sequence[Op], directory: Path, device: str | None, archs: Sequence[str], name: str | None
) -> Iterator[dict[str, object]]:
    """Write op packages into a directory, and yield their paths."""
    from opjit.library import build_library

    names = [op.qualified for op in ops]
    requested = names[0] if len(names) == 1 else names
    wanted: list[Any] = [*archs] or [None]
    for arch in [archs or None] if name else wanted:
        yield {"ops": names, "path": build_library(requested, directory, device, arch, name)}
    if name is not None:
        yield {"ops": names, "path": directory / f"{name}.so"}


def _build_entries(
    ops: Sequence[Op], targets: Sequence[Target], load: bool
) -> Iterator[dict[str, object]]:
    """Build ops into the cache, and yield their binaries."""
    from opjit import files, request

    for op, target in ((op, target) for target in targets for op in ops):
        entry = request.entry(op, target)
        if files.is_own(entry.folder):
            raise OpjitError(
                f"{op.qualified} for {target} was built, but cannot be cached; set OPJIT_CACHE to a directory that only you "
                "can write, or pass --build-directory"
            )
        if load:
            request.ready(op, target.backend, entry)
        backend = target.backend.name
        yield {"op": op.qualified, "backend": backend, "arch": target.arch, "path": entry.library}


@subcommand("opjit why allreduce", "opjit why allreduce --arch x86-64-v3")
@click.argument("op", shell_complete=ops)
@device_option
@option(
    "--arch",
    shell_complete=archs,
    help="Architecture of the request, for example sm_90 or x86-64-v3. Default: this machine's.",
)
@json_option
def why(op: str, device: str | None, arch: str | None, print_json: PrintJson) -> None:
    """Explain why a request hits or misses the cache.

    The command shows the input that changed. OP is the name or the directory of an op, or the name
    of a C++ extension. If an op and an extension have the same name, use cpp_extension.NAME for the
    extension. For an extension, the command lists its entries, their inputs, the changes between
    them, and the log of a failed build.
    """
    from opjit.api import explain
    from opjit.catalog import arguments
    from opjit.cpp_extension.entries import entries, failed_build
    from opjit.store.store import default_store

    name = op.removeprefix("cpp_extension.")
    log: Path | None = None
    extensions: list[Any] = []
    found: list[Op] = []
    try:
        found = arguments.ops(op)
    except UnknownOp:
        root = default_store()
        extensions = [*entries(name, root)]
        log = failed_build(name, root)
        if not extensions and log is None:
            if name == op:
                raise
            text = f"no entry of a C++ extension {name!r} in the cache {root.root}; run `opjit cache ls` to list the entries"
            raise OpjitError(text) from None
        if device or arch:
            text = f"--device and --arch need an op, but {name} is a C++ extension; leave them out"
            raise UsageError(text) from None
    rows = [*(explain(each, device, arch) for each in found), *extensions]
    failures = [] if log is None else [{"failed": log}]
    if print_json is not None:
        print_json([*(each.fields() for each in rows), *failures])
        return
    if log is not None:
        echo(
            f"{name}, a C++ extension: the last build failed {progress.ago(time.time() - log.stat().st_mtime)}; full output: {log}"
        )
    if extensions:
        echo(f"{name}, a C++ extension: {tally(len(extensions), 'entry')} in the cache")
    for each in rows:
        echo(readable(str(each)))
    if found and is_on("OPJIT_EMULATE"):
        echo(
            "OPJIT_EMULATE is set: without a GPU, CUDA kernels serve CPU tensors, emulated on the CPU; no cache "
            "has their binaries as entries"
        )


@subcommand("opjit doctor")
@json_option
def doctor(print_json: PrintJson) -> None:
    """Find out why this machine cannot build, cache or load ops.

    The exit code is 1 if a check finds a problem.
    """
    from opjit import doctor as checks

    sys.exit(checks.show(print_json))

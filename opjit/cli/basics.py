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

from opjit import progress
from opjit.cli import help as helps
from opjit.cli.interrupts import interruptible
from opjit.environment import is_on
from opjit.errors import OpjitError, UnknownOp
from opjit.progress import readable

if TYPE_CHECKING:  # help and completion don't import torch
    from opjit.backends.targets import Target
    from opjit.operators.op import Op


@helps.command("opjit demo", declares=False)
def demo() -> None:
    """Build, load, check and time an op on every device."""
    from rich.console import Console

    from opjit.author.demo import show

    show(Console(highlight=False), Console(stderr=True))


@helps.command("opjit list", "opjit list --json", name="list")
@helps.json_option
def list_ops(print_json: helps.PrintJson) -> None:
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
        click.echo(readable(line) if sys.stdout.isatty() else line)


@helps.command(
    "opjit get allreduce",
    "opjit get ./scale_add --arch sm_90",
    "opjit get ./scale_add allreduce --build-directory build --name my_ops",
)
@helps.ops_argument("OP...")
@helps.device_option
@helps.archs_option(
    "Build for these architectures, separated by commas (sm_90,x86-64-v3). Nothing is loaded."
)
@click.option(
    "--build-directory",
    type=helps.FOLDER,
    help="Write an op package for opjit.load_library into this directory. Nothing is loaded.",
)
@click.option(
    "--name",
    help="Name of the op package. Default: derived from the first op, the architecture and the content.",
)
@click.option(
    "--debug",
    is_flag=True,
    help="Build for gdb, cuda-gdb and profilers. Programs with OPJIT_DEBUG=1 load this binary.",
)
@click.option(
    "-W",
    "all_warnings",
    is_flag=True,
    help="Print the warnings of -Wall -Wextra.",
)
@helps.json_option
@interruptible()
def get(
    ops: tuple[str, ...],
    device: str | None,
    archs: list[str],
    build_directory: Path | None,
    name: str | None,
    debug: bool,
    all_warnings: bool,
    print_json: helps.PrintJson,
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
    from opjit.catalog import arguments
    from opjit.cli import diagnostics
    from opjit.wanted import target_of

    if debug:
        os.environ["OPJIT_DEBUG"] = "1"
    if name is not None and build_directory is None:
        raise click.UsageError(
            "--name needs --build-directory DIR, because it names the op package in that directory"
        )
    targets = [target_of(device, each) for each in archs] or [target_of(device, None)]
    chosen = [op for text in ops for op in arguments.ops(text)]
    if all_warnings:
        diagnostics.show_warnings(chosen, targets)
    for each in targets:
        if helps.is_verbose() and each.backend.uses_nvcc:
            diagnostics.show_usage(chosen, each)
    found = _build_entries(chosen, targets, load=not archs)  # builds when it is iterated
    if build_directory is not None:
        found = _packages(chosen, build_directory, device, archs, name)
    if print_json is not None:
        print_json(list(found))
        return
    for row in found:
        click.echo(row["path"])


def _packages(
    ops: Sequence[Op], directory: Path, device: str | None, archs: Sequence[str], name: str | None
) -> Iterator[dict[str, object]]:
    """Write op packages into a directory, and yield their paths."""
    from opjit.library import build_library

    names = [op.qualified for op in ops]
    requested = names[0] if len(names) == 1 else names
    if name is not None:
        yield {
            "ops": names,
            "path": build_library(requested, directory, device, archs or None, name),
        }
        yield {"ops": names, "path": directory / f"{name}.so"}
        return
    wanted: list[str | None] = [*archs] or [None]
    for arch in wanted:
        yield {"ops": names, "path": build_library(requested, directory, device, arch)}


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


@helps.command("opjit why allreduce", "opjit why allreduce --arch x86-64-v3")
@click.argument("op", shell_complete=helps.ops)
@helps.device_option
@click.option(
    "--arch",
    shell_complete=helps.archs,
    help="Architecture of the request, for example sm_90 or x86-64-v3. Default: this machine's.",
)
@helps.json_option
def why(op: str, device: str | None, arch: str | None, print_json: helps.PrintJson) -> None:
    """Explain why a request hits or misses the cache.

    The command names the input that changed. OP is the name or the directory of an op, or the name
    of a C++ extension. If an op and an extension have the same name, use cpp_extension.NAME for the
    extension. For an extension, the command lists its entries, their inputs, the changes between
    them, and the log of a failed build.
    """
    from opjit.api import explain
    from opjit.catalog import arguments
    from opjit.cpp_extension.entries import entries, failed_build
    from opjit.store.store import default_store

    explicit = op.startswith("cpp_extension.")
    name = op.removeprefix("cpp_extension.")
    root = default_store()
    extensions = entries(name, root)
    log = failed_build(name, root)
    try:
        found = [] if explicit else arguments.ops(op)
    except UnknownOp:
        if not extensions and log is None:
            raise
        found = []
    if not found and (device or arch):
        raise click.UsageError(
            f"--device and --arch need an op, but {name} is a C++ extension; leave them out"
        )
    if found:
        extensions = []
        log = None
    if explicit and not extensions and log is None:
        raise OpjitError(
            f"no entry of a C++ extension {name!r} in the cache {root.root}; run `opjit cache ls` to list the entries"
        )
    rows: list[Any] = [*(explain(each, device, arch) for each in found), *extensions]
    if print_json is not None:
        fields: list[object] = [each.fields() for each in rows]
        print_json(fields if log is None else [*fields, {"failed": log}])
        return
    if log is not None:
        click.echo(
            f"{name}, a C++ extension: the last build failed {progress.ago(time.time() - log.stat().st_mtime)}; full output: {log}"
        )
    if extensions:
        click.echo(
            f"{name}, a C++ extension: {len(extensions)} entr{'ies' if extensions[1:] else 'y'} in the cache"
        )
    for each in rows:
        click.echo(readable(str(each)))
    if found and is_on("OPJIT_EMULATE"):
        click.echo(
            "OPJIT_EMULATE is set: without a GPU, CUDA kernels serve CPU tensors, emulated on the CPU; no cache "
            "has their binaries as entries"
        )


@helps.command("opjit doctor")
@helps.json_option
def doctor(print_json: helps.PrintJson) -> None:
    """Find out why this machine cannot build, cache or load ops.

    The exit code is 1 if a check finds a problem.
    """
    from opjit import doctor as checks

    sys.exit(checks.show(print_json))

"""The command ``opjit``. Each subcommand is a few lines that call the library."""

from __future__ import annotations

import linecache
import os
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import click
from click.core import ParameterSource

from opjit import __version__, processes, progress
from opjit.cli import help as helps
from opjit.cli.cache import cache
from opjit.cli.help import PrintJson, json_option
from opjit.environment import is_on
from opjit.errors import BadSetting, CacheWarning, CompileWarning, OpjitError, UnknownOp

if TYPE_CHECKING:  # help and completion don't import torch
    from opjit.backends.targets import Target
    from opjit.operators.op import Op

_default_format = warnings.formatwarning  # of Python, or of the program that embeds it


class _Commands(helps.Group):
    """Print only the message of an opjit error, and only the op.py part of another error's traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OpjitError as error:
            raise click.ClickException(str(error)) from error
        except (click.ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            text = _op_py_error(error)
            if text is None:
                raise
            raise click.ClickException(text) from error


def _op_py_error(error: Exception) -> str | None:
    """Return the text of an error that an op.py raised, with the traceback from that file on. Return None for any other error."""
    from opjit.catalog import registry

    folder = next(
        (
            frame.f_locals["folder"]
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code is registry.declare_folder.__code__
        ),
        None,
    )
    if folder is None:
        return None
    file = str(folder / "op.py")
    lines = traceback.extract_tb(error.__traceback__)
    own = next((index for index, line in enumerate(lines) if line.filename == file), len(lines))
    place = traceback.format_exception_only(error)[:-1] if isinstance(error, SyntaxError) else []
    shown = "".join([*traceback.format_list(lines[own:]), *place])
    return f"{file} raised {type(error).__name__}: {error}\n{shown}".rstrip()


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="opjit %(version)s", help="Print the version.")
@click.option(
    "--include",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=helps.print_include,
    help="Print the directory of opjit.h, for editors and other builds.",
)
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Color the output. auto: on a terminal, unless NO_COLOR is set.",
)
@click.pass_context
def main(context: click.Context, color: str) -> None:
    """Write torch operators in plain C or CUDA C: built on first use, cached, verified and shared.

    \b
    To complete commands, ops and architectures in bash (or zsh, fish), run:
      eval "$(_OPJIT_COMPLETE=bash_source opjit)"
    """
    if color == "never" or (color == "auto" and os.environ.get("NO_COLOR")):
        context.color = False
    elif color == "always":
        context.color = True
    if context.invoked_subcommand is None:
        click.echo(helps.FIRST_STEPS, nl=False)
    warnings.formatwarning = _format_warning


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format opjit's warnings as their message, compiler warnings in the style of compilers, and other warnings as usual."""
    if issubclass(category, CompileWarning):
        excerpt = linecache.getline(filename, lineno).strip()
        return f"{filename}:{lineno}: warning: {message}\n" + f"  {excerpt}\n" * bool(excerpt)
    return (
        f"Warning: {message}\n"
        if issubclass(category, CacheWarning)
        else _default_format(message, category, filename, lineno, line)
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGHUP and SIGTERM, which job schedulers send, like Ctrl-C: end the compilers, and leave no partial results.

    This is for commands that build. Commands that run kernels keep the default, because Python cannot interrupt an endless loop in C.
    """
    received = signal.SIGINT

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        raise KeyboardInterrupt

    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]  # nohup ignores SIGHUP
    try:
        with processes.handling(heeded, interrupt):
            yield
    except KeyboardInterrupt:
        click.echo(
            f"interrupted by {received.name}; finished builds are kept, and the same command continues from there",
            err=True,
        )
        sys.exit(128 + received)


main.add_command(cache)


@main.command(name="help", cls=click.Command, epilog=helps.examples("opjit help", "opjit help get"))
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def show_help(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command."""
    found: click.Command = main
    shown = context.find_root()
    for word in words:
        child = found.get_command(shown, word) if isinstance(found, click.Group) else None
        if child is None:
            raise click.UsageError(
                f"expected a command, got {word!r}; `opjit help` lists all", shown
            )
        shown = click.Context(child, info_name=word, parent=shown)
        found = child
    click.echo(found.get_help(shown))


@main.command(cls=click.Command, epilog=helps.examples("opjit demo"))
def demo() -> None:
    """Build, load, check and time an op on every device."""
    from rich.console import Console

    from opjit.author.demo import show

    show(Console(highlight=False), Console(stderr=True))


@main.command(name="list", epilog=helps.examples("opjit list", "opjit list --json"))
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
        click.echo(
            f"{op.qualified}  [{', '.join(op.backends())}]  {op.schema.text.partition('::')[2]}"
        )


@main.command(
    epilog=helps.examples(
        "opjit get allreduce",
        "opjit get ./scale_add --arch sm_90",
        "opjit get ./scale_add allreduce --build-directory build --name my_ops",
    )
)
@click.argument("named", metavar="OP...", nargs=-1, required=True, shell_complete=helps.ops)
@helps.device_option
@click.option(
    "--arch",
    shell_complete=helps.archs,
    help="Build for these architectures, separated by commas (sm_90,x86-64-v3). Nothing is loaded.",
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
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print registers, shared memory, stack and spills of each CUDA kernel.",
)
@json_option
@_interruptible()
def get(
    named: tuple[str, ...],
    device: str | None,
    arch: str | None,
    build_directory: Path | None,
    name: str | None,
    debug: bool,
    all_warnings: bool,
    verbose: bool,
    print_json: PrintJson,
) -> None:
    """Build ops, and print the paths of their binaries.

    OP is the name or the directory of an op. Ops that are cached are not built again. With
    --build-directory, the command prints the path of the op package. With --name, it also prints the
    path of a shared library for torch.ops.load_library, which works without opjit and contains all
    architectures of --arch.

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
    archs = [each.strip() for each in arch.split(",")] if arch else []
    targets = [target_of(device, each) for each in archs] or [target_of(device, None)]
    ops = [op for text in named for op in arguments.ops(text)]
    if all_warnings:
        diagnostics.show_warnings(ops, targets)
    for each in targets:
        if verbose and each.backend.uses_nvcc:
            diagnostics.show_usage(ops, each)
    if build_directory is not None:
        found = _packages(ops, build_directory, device, archs, name)
    else:
        found = _entries(ops, targets, load=arch is None)
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


def _entries(
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


@main.command(epilog=helps.examples("opjit why allreduce", "opjit why allreduce --arch x86-64-v3"))
@click.argument("op", shell_complete=helps.ops)
@helps.device_option
@click.option(
    "--arch",
    shell_complete=helps.archs,
    help="Architecture of the request, for example sm_90 or x86-64-v3. Default: this machine's.",
)
@json_option
def why(op: str, device: str | None, arch: str | None, print_json: PrintJson) -> None:
    """Explain why a request hits or misses the cache.

    The command names the input that changed. OP is the name or the directory of an op, or the name
    of a C++ extension. If an op and an extension have the same name, use cpp_extension.NAME for the
    extension. For an extension, the command lists its entries, their inputs, the changes between
    them, and the log of a failed build.
    """
    from opjit.api import explain
    from opjit.catalog import arguments
    from opjit.cpp_extension.entries import entries, failed_build
    from opjit.store.store import Store, default_root

    explicit = op.startswith("cpp_extension.")
    name = op.removeprefix("cpp_extension.")
    root = Store(default_root())
    try:
        found = [] if explicit else arguments.ops(op)
    except UnknownOp:
        if not entries(name, root) and failed_build(name, root) is None:
            raise
        found = []
    if not found and (device or arch):
        raise click.UsageError(
            f"--device and --arch need an op, but {name} is a C++ extension; leave them out"
        )
    extensions, log = ([], None) if found else (entries(name, root), failed_build(name, root))
    if explicit and not extensions and log is None:
        raise OpjitError(
            f"no entry of a C++ extension {name!r} in the cache {root.root}; run `opjit cache ls` to list the entries"
        )
    explanations = [explain(each, device, arch) for each in found]
    if print_json is not None:
        failed = [{"failed": log}] if log is not None else []
        print_json(
            [
                *(each.fields() for each in explanations),
                *(each.fields() for each in extensions),
                *failed,
            ]
        )
        return
    if log is not None:
        click.echo(
            f"{name}, a C++ extension: the last build failed {progress.ago(time.time() - log.stat().st_mtime)}; full output: {log}"
        )
    if extensions:
        click.echo(
            f"{name}, a C++ extension: {len(extensions)} entr{'ies' if extensions[1:] else 'y'} in the cache"
        )
    for text in (*map(str, explanations), *map(str, extensions)):
        click.echo(text)
    if found and is_on("OPJIT_EMULATE"):
        click.echo(
            "OPJIT_EMULATE is set: without a GPU, CUDA kernels serve CPU tensors, emulated on the CPU; no cache "
            "has their binaries as entries"
        )


@main.command(epilog=helps.examples("opjit doctor"))
@json_option
def doctor(print_json: PrintJson) -> None:
    """Find out why this machine cannot build, cache or load ops.

    The exit code is 1 if it cannot.
    """
    from opjit import doctor as checks

    sys.exit(checks.show(print_json))


@main.command(
    cls=click.Command,
    epilog=helps.examples(
        "opjit new mylib::scale_add --backward --cuda", "opjit new --project mylib"
    ),
)
@click.argument("name", metavar="NAMESPACE::NAME|PROJECT|DEVICE")
@click.argument("directory", type=helps.FOLDER, default=".")
@click.option("--backward", is_flag=True, help="Add a backward for autograd.")
@click.option("--cuda", is_flag=True, help="Add a CUDA kernel.")
@click.option(
    "--project",
    is_flag=True,
    help="Write a project: a package with an op, and a build hook that puts binaries into its wheel.",
)
@click.option(
    "--backend",
    is_flag=True,
    help="Write a backend for a device, with a kernel for a bundled op.",
)
def new(
    name: str, directory: Path, backward: bool, cuda: bool, project: bool, backend: bool
) -> None:
    """Write a new op, project or backend, to start from.

    The command creates a directory with op.py, kernels and a test in DIRECTORY. They build and pass without an edit.
    """
    from opjit.author.new import new_backend, new_op, new_project

    if backend:
        if backward or cuda or project:
            raise click.UsageError(
                "--backend cannot be combined with --backward, --cuda or --project"
            )
        folder = new_backend(name, directory)
        click.echo(
            f"wrote {folder}: import {name}.backend together with the package that adds the device to torch"
        )
        return
    if project:
        folder = new_project(name, directory, backward, cuda)
        # Without isolation, this very opjit and its torch build the project; neither need be on an index.
        click.echo(
            f"wrote {folder}: cd {shlex.quote(str(folder))}, then pip install --no-build-isolation -e '.[test]' && pytest, "
            "then pip wheel --no-build-isolation --no-deps ."
        )
        return
    folder = new_op(name, directory, backward, cuda)
    place = shlex.quote(f"{folder}" if folder.is_absolute() else f"./{folder}")
    click.echo(
        f"wrote {folder}: opjit get {place}, then opjit test {place}, then opjit bench {place}"
    )


@main.command(
    epilog=helps.examples(
        "opjit test ./scale_add", "opjit test ./scale_add --sanitize address,undefined"
    )
)
@click.argument("ops", metavar="OP...", nargs=-1, shell_complete=helps.ops, required=True)
@helps.devices_option
@click.option(
    "--only",
    multiple=True,
    metavar="CHECK",
    shell_complete=helps.checks,
    help="Run only this check. Can be repeated.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    metavar="N",
    help="Make only call N of the check in --only, counted from 0.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Fail a check if one call of the kernel needs more time.",
)
@click.option(
    "--sanitize",
    default="address,undefined",
    show_default=True,
    help="Also run under these sanitizers: address,undefined,leak,thread for C, "
    "memcheck,racecheck,initcheck,synccheck for CUDA. Use none for no sanitizer.",
)
@click.option("-x", "--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option(
    "--last-failed",
    is_flag=True,
    help="Run only the checks that failed in the last run, or all of them if none did.",
)
@click.option("--junit", type=helps.FILE, metavar="FILE", help="Write the results as JUnit's XML.")
@click.option(
    "--emulate",
    is_flag=True,
    help="Run CUDA kernels on the CPU, with checks for races and bounds, as `--device cuda` does without a GPU.",
)
@click.option(
    "--ranks",
    type=int,
    help="Only compare the samples with the reference, on so many ranks at once: CPU ranks or, with --device cuda, GPUs. "
    "With --emulate, all ranks run emulated in one process.",
)
@json_option
@_interruptible()
def test(
    ops: tuple[str, ...],
    device: str | None,
    only: tuple[str, ...],
    sample: int | None,
    time_limit: float,
    sanitize: str,
    fail_fast: bool,
    last_failed: bool,
    junit: Path | None,
    emulate: bool,
    ranks: int | None,
    print_json: PrintJson,
) -> None:
    """Run every check of an op.

    OP is the name or the directory of an op. The exit code is 1 if a check fails. The command first prints the warnings of -Wall -Wextra.
    The checks run in a child process, so if a kernel crashes, exits or never returns, only its check fails.
    """
    from opjit.cli import diagnostics
    from opjit.testing import isolation, report
    from opjit.testing.command import Options, exit_code, run
    from opjit.testing.sanitize import parse

    if ranks is not None:
        if emulate or _lacks_gpu(device):
            from opjit.emulate import ranks as emulated_ranks

            sys.exit(emulated_ranks.run(ops, ranks))
        from opjit.testing import across_ranks

        sys.exit(across_ranks.run(ops, ranks, device))
    demanded = (
        click.get_current_context().get_parameter_source("sanitize") is ParameterSource.COMMANDLINE
    )
    options = Options(
        device, parse(sanitize), only, sample, time_limit, demanded, fail_fast, last_failed
    )

    if emulate or _lacks_gpu(device):
        from opjit.emulate.checks import EMULATOR

        options = options._replace(device="cuda", emulator=EMULATOR)

    def warn(found: list[Any]) -> None:
        if not only and options.emulator is None:
            isolation.apart(partial(diagnostics.show_all_warnings, found, device))

    results = run(ops, options, warn)
    if junit is not None:
        report.write_junit(results, junit)
    if print_json is not None:
        print_json([result.fields() for result in results])
    sys.exit(exit_code(results))


def _refuse_emulated() -> None:
    """Raise BadSetting if kernels would run emulated in a command that measures them."""
    if is_on("OPJIT_EMULATE"):
        raise BadSetting("an emulated kernel has no time that means anything; unset OPJIT_EMULATE")


def _lacks_gpu(device: str | None) -> bool:
    """Return whether a command names CUDA on a machine that cannot run it."""
    from opjit import backends

    return device == "cuda" and backends.for_device(device).available() is not None


@main.command(epilog=helps.examples("opjit wheel ./scale_add --arch x86-64-v3,x86-64-v4,sm_90"))
@click.argument(
    "folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--arch",
    shell_complete=helps.archs,
    required=True,
    help="Architectures to build for, separated by commas. You don't need a GPU.",
)
@helps.host_option
@click.option("--name", help="Name of the wheel. Default: the namespace of the ops with -ops.")
@click.option("--version", default="0.1.0", show_default=True, help="Version of the wheel.")
@click.option("-o", "--output", type=helps.FOLDER, default=".", help="Directory for the wheel.")
@_interruptible()
def wheel(
    folders: tuple[Path, ...],
    arch: str,
    hosts: list[str],
    name: str | None,
    version: str,
    output: Path,
) -> None:
    """Build a wheel with ops and their binaries.

    The wheel contains the sources of the op directories, and binaries for the architectures. Users of these architectures need no compiler.
    """
    from opjit.author.wheel import make

    click.echo(
        make(folders, [each.strip() for each in arch.split(",")], output, name, version, hosts)
    )


@main.command(
    epilog=helps.examples(
        "opjit precompile --all --arch x86-64-v3,sm_80,sm_90",
        "opjit precompile --from ops.json --store /opt/opjit",
        "opjit precompile --check ops.json --store /opt/opjit",
    )
)
@click.argument("ops", metavar="[OP]...", nargs=-1, shell_complete=helps.ops)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Build all ops: bundled, in OPJIT_PATH and in installed packages.",
)
@click.option(
    "--from",
    "recorded",
    metavar="FILE",
    type=helps.FILE,
    help="Build the op list that `opjit record` wrote.",
)
@click.option(
    "--check",
    metavar="FILE",
    type=helps.FILE,
    help="Build nothing. Check that every entry of the op list is cached, and list the missing entries.",
)
@click.option(
    "--arch",
    shell_complete=helps.archs,
    default="",
    help="Architectures to build for, separated by commas. You don't need a GPU. Default: this machine's.",
)
@helps.host_option
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Largest number of parallel builds. Default: $OPJIT_JOBS, or a number that fits CPUs and memory.",
)
@click.option(
    "--extensions",
    is_flag=True,
    help="Also build the C++ extensions of the list. Use it only if you trust the list, because its flags can run any code.",
)
@click.option(
    "--store",
    metavar="DIR",
    type=helps.FOLDER,
    help="Fill this directory instead of the cache, for an image or for OPJIT_LAYERS. All users can read it.",
)
@json_option
@_interruptible()
def precompile(
    ops: tuple[str, ...],
    everything: bool,
    recorded: Path | None,
    check: Path | None,
    arch: str,
    hosts: list[str],
    jobs: int | None,
    extensions: bool,
    store: Path | None,
    print_json: PrintJson,
) -> None:
    """Build ops in advance, for any architecture.

    OP is the name or the directory of an op. The exit code is 1 if a build fails. If the command is interrupted, run it again to continue.
    """
    from opjit.ahead.plan import plan_ops, plan_recorded
    from opjit.ahead.precompile import build_plan, check_precompiled, error_texts

    if bool(ops) + everything + (recorded is not None) + (check is not None) != 1:
        raise click.UsageError("expected OPs, --all, --from FILE or --check FILE")
    if extensions and recorded is None and check is None:
        raise click.UsageError("--extensions needs --from FILE, an op list from `opjit record`")
    archs = [each.strip() for each in arch.split(",")] if arch else []
    if check is not None:
        count = check_precompiled(check, archs, store=store, extensions=extensions, hosts=hosts)
        click.echo(f"all {count} entries of {check} are there")
        return
    listed = recorded and plan_recorded(recorded, archs, store, extensions, hosts)
    plan = listed or plan_ops(ops or None, archs, store, hosts)
    for remark in plan.remarks:
        click.echo(remark, err=True)
    report = build_plan(plan, jobs, sys.stdout, click.echo)
    for complaint in error_texts(report.failed):
        click.echo(f"Error: {complaint}", err=True)
    if print_json is None:
        click.echo(report)
    else:
        print_json(
            {
                "built": [str(wanted) for wanted in report.built],
                "there": [str(wanted) for wanted in report.there],
                "skipped": report.skipped,
                "failed": {failed: str(error) for failed, error in report.failed},
                "seconds": report.seconds,
            }
        )
    sys.exit(1 if report.failed else 0)


@main.command(epilog=helps.examples("opjit record -o ops.json -- python train.py"))
@click.option(
    "-o",
    "--output",
    type=helps.FILE,
    default="ops.json",
    show_default=True,
    help="Op list for `opjit precompile --from`.",
)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def record(output: Path, command: tuple[str, ...]) -> None:
    """Record the ops and C++ extensions that a program uses.

    The command runs COMMAND and writes an op list. Child processes are included. The command exits with the code of COMMAND.
    """
    from opjit.ahead.record import record as record_ops
    from opjit.declare.oplist import read_list

    code = record_ops(command, output)
    ops, extensions = read_list(output)
    hint = "" if ops or extensions else "; the program called no op and loaded no C++ extension"
    click.echo(
        f"wrote {output}: {len(ops)} ops and {len(extensions)} C++ extensions{hint}", err=True
    )
    sys.exit(code)


@main.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    epilog=helps.examples(
        "opjit run train.py --epochs 3", "opjit run setup.py build_ext --inplace"
    ),
)
@click.argument(
    "program",
    metavar="PROGRAM|-m MODULE [ARGUMENT]...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
)
def run(program: tuple[str, ...]) -> None:
    """Run a program with its C++ extensions from the cache.

    The command runs PROGRAM like python. If the program or its child processes load an extension through torch, or build one with a
    setup.py, it comes from the cache. A child that ignores PYTHONPATH, for example after python -I, keeps torch's functions.
    """
    from opjit import cpp_extension

    cpp_extension.run_program(program)


@main.command(cls=click.Command, epilog=helps.examples("opjit keygen ci keys"))
@click.argument("name")
@click.argument("directory", type=helps.FOLDER, default=".")
def keygen(name: str, directory: Path) -> None:
    """Make a key pair that signs entries.

    The command writes NAME.key and NAME.pub into DIRECTORY. Keep NAME.key secret, and give NAME.pub
    to everyone who should trust your entries.
    """
    from opjit.share import trust

    private, public = trust.keygen(name, directory)
    click.echo(f"{private} signs entries: opjit cache push --sign {private}. Keep it secret.")
    click.echo(
        f"To trust these entries, set OPJIT_TRUST to {directory / name}.pub, or to the key itself:"
    )
    click.echo(f"export OPJIT_TRUST={public}")


@main.command(
    epilog=helps.examples(
        "opjit bench allreduce --device cpu --only 2^20",
        "opjit bench tensor_negate --against aten::neg",
    )
)
@click.argument("ops", metavar="OP...", nargs=-1, shell_complete=helps.ops, required=True)
@helps.devices_option
@click.option("--only", help="Measure only the benchmark cases with this text in their label.")
@click.option(
    "--json",
    "json_file",
    type=click.File("w", lazy=False),
    help="Write the measurements to this file.",
)
@click.option(
    "--plot",
    "plot_file",
    type=click.File("wb", lazy=False),
    help="Plot the ratios into this PNG file (needs matplotlib).",
)
@click.option(
    "--against",
    metavar="SIDE",
    help="Baseline instead of the reference: torch.compile, an op (aten::neg) or a function (module:name).",
)
@click.option(
    "--cold/--hot",
    default=None,
    help="Measure with cold or warm hardware caches. Default: cold on CUDA, hot on the CPU.",
)
def bench(
    ops: tuple[str, ...],
    device: str | None,
    only: str | None,
    json_file: TextIO | None,
    plot_file: BinaryIO | None,
    against: str | None,
    cold: bool | None,
) -> None:
    """Measure an op against its reference in plain torch.

    OP is the name or the directory of an op. Results are checked first. In the table, +- is the spread of the ratio over the rounds. The
    rate is in B/s, or in FLOP/s if the benchmark case declares its operations. On CUDA, the time is device time, "host us" is the CPU time
    to issue a call, and "roof" is the reached part of the roofline.
    """
    _refuse_emulated()
    from opjit.author.bench import benchmark

    sys.exit(benchmark(ops, device, only, json_file, plot_file, against, cold))


@main.command(
    epilog=helps.examples(
        "opjit tune ./scale_add", "opjit tune mylib::scale_add --device cuda --only 2^20"
    )
)
@click.argument("ops", metavar="OP...", nargs=-1, shell_complete=helps.ops, required=True)
@helps.devices_option
@click.option(
    "--only", default="", help="Tune only for the benchmark cases with this text in their label."
)
@json_option
def tune(ops: tuple[str, ...], device: str | None, only: str, print_json: PrintJson) -> None:
    """Autotune the variants of an op in advance.

    OP is the name or the directory of an op. For each benchmark case, the command builds and measures all variants, and records the fastest
    one in the cache. Calls with these sizes then measure nothing.
    """
    _refuse_emulated()
    from opjit import backends
    from opjit import tune as tuning
    from opjit.catalog import arguments
    from opjit.measure.units import format_time

    rows = []
    for op, name in arguments.ops_on_devices(ops, device, partial(click.echo, err=True)):
        backend = backends.for_device(name)
        labels = op.declaration.labels(backend)
        click.echo(f"{op.qualified} has {len(labels) or 'no'} variants for {name}")
        for each in op.workloads_on(name) if labels else ():
            if only in each.label:
                choice = tuning.tune(op, backend, each.args, each.kwargs)
                rows.append(
                    {
                        "op": op.qualified,
                        "device": name,
                        "case": each.label,
                        "variant": choice.variant if choice else None,
                        "seconds": choice.seconds if choice else None,
                    }
                )
                click.echo(
                    f"  {each.label:<20} {choice.variant:<30} {format_time(choice.seconds)}"
                    if choice
                    else f"  {each.label}: fails"
                )
    if print_json is not None:
        print_json(rows)


@main.command(
    epilog=helps.examples(
        "opjit judge ./scale_add a.c b.c c.cu --json -",
        "opjit judge 19_ReLU.py candidate.py",
        "opjit judge ./scale_add --lint",
    )
)
@click.argument("task", shell_complete=helps.ops)
@click.argument(
    "candidates",
    metavar="[CANDIDATE]...",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--op", metavar="NAME", help="Op to judge, if TASK declares several.")
@click.option(
    "--lint",
    is_flag=True,
    help="Check the task instead: report trivial outputs that would pass.",
)
@helps.device_option
@click.option(
    "--gpus", default="", help="Numbers of the GPUs to use, separated by commas. Default: all."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of parallel candidates. Default: a number that fits CPUs and memory.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of a call.",
)
@click.option(
    "--json",
    "json_file",
    type=click.File("w"),
    help="Write verdicts to this file as lines of JSON. - is stdout.",
)
@click.option(
    "--serve",
    "socket",
    type=click.Path(path_type=Path),
    help="Read candidates from a socket, one line of JSON each.",
)
@click.option(
    "--emulate",
    is_flag=True,
    help="First run CUDA code on the CPU, which finds races that results do not show. Without a GPU, `--device cuda` only does this.",
)
def judge(
    task: str,
    candidates: tuple[Path, ...],
    op: str | None,
    lint: bool,
    device: str | None,
    gpus: str,
    workers: int | None,
    time_limit: float,
    json_file: Any,
    socket: Path | None,
    emulate: bool,
) -> None:
    """Compile, check and time untrusted kernels.

    TASK is the name or the directory of an op, or a KernelBench file. A CANDIDATE is C or CUDA code of the op, or Python code with a
    ModelNew. The exit code is 0 if every candidate got a verdict.
    """
    from opjit.judge import command
    from opjit.judge.scheduler import Judge
    from opjit.judge.task import Task

    if bool(candidates) + lint + (socket is not None) != 1:
        raise click.UsageError("expected CANDIDATEs, --serve SOCKET or --lint")
    if lint:
        found = command.lint(Task(task, device or "cpu", 0, op))
        click.echo("\n".join(found) or "no trivial output would pass")
        sys.exit(bool(found))
    numbers = [int(each) for each in gpus.split(",") if each.strip().isdecimal()]
    command.run(
        Judge(
            task,
            workers=workers,
            device=device or ("cuda" if emulate else None),
            gpus=numbers,
            seconds=time_limit,
            op=op,
            emulate=emulate,
        ),
        candidates,
        json_file,
        socket,
    )

"""The command ``opjit``. Each of its commands is a few lines over the library."""

import linecache
import os
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TextIO

import click
from click.core import ParameterSource

from opjit import __version__, processes, progress
from opjit.cli import help as helps
from opjit.cli.cache import cache
from opjit.cli.help import PrintJson, json_option
from opjit.errors import CacheWarning, CompileWarning, OpjitError, UnknownOp

_default_format = warnings.formatwarning  # Python's, or the embedding program's


class _Commands(helps.Group):
    """Shows opjit's errors as their message alone, and an op.py's errors without opjit's part of the traceback."""

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
    """Return the text of an error that an op.py raised, with the traceback from that file on; None for any other error."""
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
@click.version_option(
    __version__, message="opjit %(version)s", help="Print the version; opjit doctor says more."
)
@click.option(
    "--include",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=helps.print_include,
    help="Print the folder of opjit.h, for editors and for builds of your own.",
)
@click.pass_context
def main(context: click.Context) -> None:
    """Write torch operators in plain C or CUDA C: built on first use, cached, verified and shared.

    \b
    Completion of commands, ops and archs in bash (zsh, fish likewise):
      eval "$(_OPJIT_COMPLETE=bash_source opjit)"
    """
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
    """Format opjit's warnings as their message alone, a compiler's as compilers do, and other warnings as usual."""
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
    """Treat SIGTERM, which job schedulers send, and SIGHUP like Ctrl-C: end the compilers too, and leave no partial results.
    This is for commands that build. Commands that run kernels keep the default, because Python cannot interrupt an endless loop in C."""
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


@main.command(cls=click.Command, epilog=helps.examples("opjit demo"))
def demo() -> None:
    """Build an op, load it, and compare it with torch, on every device."""
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
    help="Build for these archs, separated by commas (sm_90,x86-64-v3), instead of this machine's; nothing is loaded.",
)
@click.option(
    "--build-directory",
    type=helps.FOLDER,
    help="Put the binaries and their op.py files into one library in this folder, for opjit.load_library; nothing is loaded.",
)
@click.option(
    "--name",
    help="Name of the library in the build directory; default: from the first op, the arch and the content.",
)
@click.option(
    "--debug",
    is_flag=True,
    help="Build it for gdb, cuda-gdb and profilers; programs with OPJIT_DEBUG=1 load this binary.",
)
@click.option(
    "-W",
    "all_warnings",
    is_flag=True,
    help="Also compile with -Wall -Wextra, and print the warnings.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="For CUDA, show each kernel's registers, shared memory, stack and spills; the file is compiled once more.",
)
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
) -> None:
    """Build ops unless a cache has them, and print the paths. An OP is an op's name or folder. With --build-directory, the path is the
    library's.

    \b
    In a debugger:
        OPJIT_DEBUG=1 gdb --args python program.py
        (gdb) break scale.c:12

    A debug build (-g -Og, -G for kernels) has a key of its own, and is in no wheel and no remote.
    """
    from opjit import files, request
    from opjit.catalog import arguments
    from opjit.cli import diagnostics
    from opjit.library import build_library
    from opjit.wanted import target_of

    if debug:
        os.environ["OPJIT_DEBUG"] = "1"
    if name is not None and build_directory is None:
        raise click.UsageError(
            "--name names a library in a build directory; give --build-directory, too"
        )
    archs: list[str | None] = [each.strip() for each in arch.split(",")] if arch else [None]
    if name is not None and archs[1:]:
        raise click.UsageError(
            "--name names one library, and each arch has its own; leave it out, or name one arch"
        )
    targets, ops = (
        [target_of(device, each) for each in archs],
        [op for text in named for op in arguments.ops(text)],
    )
    if all_warnings:
        diagnostics.show_warnings(ops, targets)
    for each in targets:
        if verbose and each.backend.uses_nvcc:
            diagnostics.show_usage(ops, each)
    if build_directory is not None:
        names = [op.qualified for op in ops]
        for wanted in archs:
            click.echo(
                build_library(
                    names[0] if len(names) == 1 else names, build_directory, device, wanted, name
                )
            )
        return
    for found, target in ((op, target) for target in targets for op in ops):
        entry = request.entry(found, target)
        if files.is_own(entry.folder):
            raise OpjitError(
                f"{found.qualified} for {target} was built, but no cache can keep it after this command; set OPJIT_CACHE to a "
                "folder of your own, or give --build-directory"
            )
        if arch is None:
            request.ready(found, target.backend, entry)
        click.echo(entry.library)


@main.command(epilog=helps.examples("opjit why allreduce", "opjit why allreduce --arch x86-64-v3"))
@click.argument("op", shell_complete=helps.ops)
@helps.device_option
@click.option(
    "--arch",
    shell_complete=helps.archs,
    help="Arch to ask for (sm_90, x86-64-v3, …); default: this machine's.",
)
@json_option
def why(op: str, device: str | None, arch: str | None, print_json: PrintJson) -> None:
    """Say why a request hits or misses, and which input changed. OP is an op's name or folder. For a C++ extension (opjit.load), list its
    entries, what each was made from, what changed between them, and the log of a last build that failed. It goes by its NAME or, if an op
    has that name, too, by cpp_extension.NAME.
    """
    from opjit.api import explain
    from opjit.catalog import arguments
    from opjit.cpp_extension.entries import entries, failed_build
    from opjit.store.store import Store, default_root

    explicit = op.startswith("cpp_extension.")
    name, root = op.removeprefix("cpp_extension."), Store(default_root())
    try:
        found = [] if explicit else arguments.ops(op)
    except UnknownOp:
        if not entries(name, root) and failed_build(name, root) is None:
            raise
        found = []
    if not found and (device or arch):
        raise click.UsageError(
            f"--device and --arch are for ops, and {name} is a C++ extension; leave them out"
        )
    extensions, log = ([], None) if found else (entries(name, root), failed_build(name, root))
    if explicit and not extensions and log is None:
        raise OpjitError(
            f"the cache {root.root} has no entry of a C++ extension {name!r}; `opjit cache ls` lists the entries"
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


@main.command(epilog=helps.examples("opjit doctor"))
@json_option
def doctor(print_json: PrintJson) -> None:
    """Find out why a machine cannot build, cache or load ops. The exit code is 1 if anything prevents that."""
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
    help="NAME is a project: a package with an op, whose wheel contains binaries.",
)
@click.option(
    "--backend",
    is_flag=True,
    help="NAME is a device: a backend for it, with a kernel for one of opjit's ops.",
)
def new(
    name: str, directory: Path, backward: bool, cuda: bool, project: bool, backend: bool
) -> None:
    """Write the folder of a new op, a project or a backend. DIRECTORY gets op.py, kernels and a test, which build and pass as they are."""
    from opjit.author.new import new_backend, new_op, new_project

    if backend:
        if backward or cuda or project:
            raise click.UsageError("--backend goes with none of --backward, --cuda and --project")
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
    "--only", multiple=True, metavar="CHECK", help="Run this check only; may be given again."
)
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    metavar="N",
    help="Make only call N of the check that --only names, counted from 0.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Fail a check when one call of the kernel takes longer.",
)
@click.option(
    "--sanitize",
    default="address,undefined",
    show_default=True,
    help="Also make the calls under sanitizers: address,undefined,leak,thread for C, "
    "memcheck,racecheck,initcheck,synccheck for CUDA; or none.",
)
@click.option("-x", "--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option(
    "--last-failed",
    is_flag=True,
    help="Run only the checks that failed in the last run, or all of them if none did.",
)
@click.option("--junit", type=helps.FILE, metavar="FILE", help="Write the results as JUnit's XML.")
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
    print_json: PrintJson,
) -> None:
    """Run every check of an op.

    OP is an op's name or folder. The exit code is 1 if a check fails. The command first
    prints the compilers' warnings with -Wall and -Wextra. The checks run in a child
    process: a kernel that crashes, exits or never returns fails its check, and the
    other checks go on.
    """
    from opjit.cli import diagnostics
    from opjit.testing import isolation, report
    from opjit.testing.command import Options, exit_code, run
    from opjit.testing.sanitize import parse

    demanded = (
        click.get_current_context().get_parameter_source("sanitize") is ParameterSource.COMMANDLINE
    )
    options = Options(
        device, parse(sanitize), only, sample, time_limit, demanded, fail_fast, last_failed
    )

    def warn(found: list[Any]) -> None:
        if not only:
            isolation.apart(partial(diagnostics.show_all_warnings, found, device))

    results = run(ops, options, warn)
    if junit is not None:
        report.write_junit(results, junit)
    if print_json is not None:
        print_json([result.fields() for result in results])
    sys.exit(exit_code(results))


@main.command(epilog=helps.examples("opjit wheel ./scale_add --arch x86-64-v3,x86-64-v4,sm_90"))
@click.argument(
    "folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--arch",
    shell_complete=helps.archs,
    required=True,
    help="Archs to build for, separated by commas: x86-64-v3,x86-64-v4,sm_80,sm_90. No GPU is needed.",
)
@helps.host_option
@click.option("--name", help="The wheel's name; default: the ops' namespace with -ops.")
@click.option("--version", default="0.1.0", show_default=True, help="The wheel's version.")
@click.option("-o", "--output", type=helps.FOLDER, default=".", help="Folder for the wheel.")
@_interruptible()
def wheel(
    folders: tuple[Path, ...],
    arch: str,
    hosts: list[str],
    name: str | None,
    version: str,
    output: Path,
) -> None:
    """Pack ops into a wheel, with their binaries. It has the sources of the op FOLDERs, and binaries for the archs, which need no compiler
    after installation.
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
    help="All ops that are bundled, in OPJIT_PATH, or in installed packages.",
)
@click.option(
    "--from",
    "recorded",
    metavar="FILE",
    type=helps.FILE,
    help="The ops of a list from `opjit record`, for its archs.",
)
@click.option(
    "--check",
    metavar="FILE",
    type=helps.FILE,
    help="Build nothing; say whether all that --from FILE would build, with the same options, is there, and what is missing.",
)
@click.option(
    "--arch",
    shell_complete=helps.archs,
    default="",
    help="Archs to build for, separated by commas: x86-64-v3,sm_80,sm_90. No GPU is needed. Default: this machine's.",
)
@helps.host_option
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Builds at once, at most; default: $OPJIT_JOBS, else what CPUs and memory allow.",
)
@click.option(
    "--extensions",
    is_flag=True,
    help="Also build the list's C++ extensions; only from a list that you trust, as their flags can run any code.",
)
@click.option(
    "--store",
    metavar="DIR",
    type=helps.FOLDER,
    help="Fill this store instead of the cache, for an image or for OPJIT_LAYERS; everyone may read it.",
)
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
) -> None:
    """Build ops ahead of requests, for any arch. OP is an op's name or folder; the exit code is 1 if a build fails."""
    from opjit.ahead.plan import plan_ops, plan_recorded
    from opjit.ahead.precompile import build_plan, check_precompiled, error_texts

    if bool(ops) + everything + (recorded is not None) + (check is not None) != 1:
        raise click.UsageError("name OPs, or give --all, or --from FILE, or --check FILE")
    if extensions and recorded is None and check is None:
        raise click.UsageError("--extensions goes with --from FILE, a list from `opjit record`")
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
    click.echo(report)
    sys.exit(1 if report.failed else 0)


@main.command(epilog=helps.examples("opjit record -o ops.json -- python train.py"))
@click.option(
    "-o",
    "--output",
    type=helps.FILE,
    default="ops.json",
    show_default=True,
    help="The list, for `opjit precompile --from`.",
)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def record(output: Path, command: tuple[str, ...]) -> None:
    """List the ops and C++ extensions that a program uses. Runs COMMAND, whose processes all count; the exit code is the command's."""
    from opjit.ahead.record import record as record_ops

    sys.exit(record_ops(command, output))


@main.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],
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
    """Run a program with its C++ extensions from the cache. Runs a Python PROGRAM as `python` does; what it and its children load, or
    build by a setup.py, through torch comes from opjit's cache. A child that ignores PYTHONPATH, as after `python -I`, keeps torch's
    functions.
    """
    from opjit import cpp_extension

    cpp_extension.run_program(program)


@main.command(cls=click.Command, epilog=helps.examples("opjit keygen ci keys"))
@click.argument("name")
@click.argument("directory", type=helps.FOLDER, default=".")
def keygen(name: str, directory: Path) -> None:
    """Make a key pair that signs entries. In DIRECTORY, NAME.key signs entries, and NAME.pub is for everyone who trusts them."""
    from opjit.share import trust

    private, public = trust.keygen(name, directory)
    click.echo(f"{private} signs entries: opjit cache push --sign {private}; keep it secret")
    click.echo(
        f"{directory / name}.pub is for everyone who trusts them; set OPJIT_TRUST to its path, or to the key itself:"
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
@click.option("--only", help="Measure only the workloads whose label contains this text.")
@click.option(
    "--json",
    "json_file",
    type=click.File("w", lazy=False),
    help="Also write the measurements to this file.",
)
@click.option(
    "--plot",
    "plot_file",
    type=click.File("wb", lazy=False),
    help="Also plot the ratios into this PNG file (needs matplotlib).",
)
@click.option(
    "--against",
    metavar="SIDE",
    help="Measure against torch.compile of the reference, another op (aten::neg) or a function (module:name) instead.",
)
@click.option(
    "--cold/--hot",
    default=None,
    help="Whether caches hold none of a call's inputs, or those of the call before; default: cold on CUDA, hot on the CPU.",
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
    """Measure an op against its reference in plain torch. OP is an op's name or folder. Results are checked first. +- is the spread of the
    ratio over the rounds; the rate is in B/s, or in FLOP/s where the workload declares its operations. On CUDA the time is the device's,
    host us the host's to issue a call, and roof the part of the roofline that is reached.
    """
    from opjit.author.bench import benchmark

    sys.exit(benchmark(ops, device, only, json_file, plot_file, against, cold))


@main.command(
    epilog=helps.examples(
        "opjit tune ./scale_add", "opjit tune mylib::scale_add --device cuda --only 2^20"
    )
)
@click.argument("ops", metavar="OP...", nargs=-1, shell_complete=helps.ops, required=True)
@helps.devices_option
@click.option("--only", default="", help="Only the workloads whose label contains this text.")
def tune(ops: tuple[str, ...], device: str | None, only: str) -> None:
    """Choose among an op's variants, ahead of calls. OP is an op's name or folder. For the sizes of each workload that the op declares, the
    variants are built, measured, and the fastest recorded in the cache; a call with such sizes then measures nothing.
    """
    from opjit import backends
    from opjit import tune as tuning
    from opjit.catalog import arguments
    from opjit.measure.units import format_time

    for op, name in arguments.ops_on_devices(ops, device, partial(click.echo, err=True)):
        backend = backends.for_device(name)
        labels = op.declaration.labels(backend)
        click.echo(f"{op.qualified} has {len(labels) or 'no'} variants for {name}")
        for each in op.workloads_on(name) if labels else ():
            if only in each.label:
                choice = tuning.tune(op, backend, each.args, each.kwargs)
                click.echo(
                    f"  {each.label:<20} {choice.variant:<30} {format_time(choice.seconds)}"
                    if choice
                    else f"  {each.label}: fails"
                )


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
@click.option("--op", metavar="NAME", help="Which op of a TASK that declares several.")
@click.option(
    "--lint",
    is_flag=True,
    help="Judge the task instead: what would pass though it computes nothing.",
)
@helps.device_option
@click.option(
    "--gpus", default="", help="Numbers of the GPUs to use, separated by commas; default: all."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Candidates at once; default: as CPUs and memory allow.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time of a call.",
)
@click.option(
    "--json",
    "json_file",
    type=click.File("w"),
    help="Write verdicts to this file as lines of JSON; - is stdout.",
)
@click.option(
    "--serve",
    "socket",
    type=click.Path(path_type=Path),
    help="Take candidates from a socket, as lines of JSON.",
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
) -> None:
    """Compile, check and time kernels of strangers. TASK is an op's name or folder, or a KernelBench file; a CANDIDATE is C or CUDA text of
    the op, or Python with a ModelNew. The exit code is 0 if every candidate got a verdict.
    """
    from opjit.judge import command
    from opjit.judge.scheduler import Judge
    from opjit.judge.task import Task

    if bool(candidates) + lint + (socket is not None) != 1:
        raise click.UsageError("name CANDIDATEs, or give --serve SOCKET, or --lint")
    if lint:
        found = command.lint(Task(task, device or "cpu", 0, op))
        click.echo("\n".join(found) or "nothing that computes nothing would pass")
        sys.exit(bool(found))
    numbers = [int(each) for each in gpus.split(",") if each.strip().isdecimal()]
    command.run(
        Judge(task, workers=workers, device=device, gpus=numbers, seconds=time_limit, op=op),
        candidates,
        json_file,
        socket,
    )

"""The commands for authors of ops: new, test, bench, tune, judge and wheel."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click
from click.core import ParameterSource

from opjit.cli import help as helps
from opjit.cli.interrupts import interruptible
from opjit.environment import is_on
from opjit.errors import BadSetting

_KIND = click.Choice(["elementwise", "reduction", "in-place", "list", "half"])


@helps.command(
    "opjit new mylib::scale_add --backward --cuda",
    "opjit new mylib::row_norm --kind reduction",
    "opjit new --project mylib",
    declares=False,
)
@click.argument("name", metavar="NAMESPACE::NAME|PROJECT|DEVICE")
@click.argument("directory", type=helps.FOLDER, default=".")
@click.option(
    "--kind",
    type=_KIND,
    help="Kind of the op. Default: elementwise, or a question on a terminal. The other kinds cannot be combined with --backward or --cuda.",
)
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
    name: str,
    directory: Path,
    kind: str | None,
    backward: bool,
    cuda: bool,
    project: bool,
    backend: bool,
) -> None:
    """Write the files of a new op, project or backend.

    The command creates a directory in DIRECTORY with op.py, kernels and a test. The new op builds and
    passes its test before you edit it.
    """
    from opjit.author.new import new_backend, new_op, new_project

    if kind not in (None, "elementwise") and (backward or cuda or project or backend):
        raise click.UsageError(
            f"--kind {kind} cannot be combined with --backward, --cuda, --project or --backend, because it writes a C kernel for the "
            "CPU only; leave them out, and write the backward in op.py as the op of `opjit new mylib::scale_add --backward` does"
        )
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
    if kind is None and not (backward or cuda) and sys.stdin.isatty():
        kind = click.prompt("kind", type=_KIND, default="elementwise")
    folder = new_op(name, directory, backward, cuda, kind or "elementwise")
    place = shlex.quote(f"{folder}" if folder.is_absolute() else f"./{folder}")
    click.echo(f"wrote {folder}\nBuild it and run its checks: opjit test {place}")


@helps.command("opjit test ./scale_add", "opjit test ./scale_add --sanitize address,undefined")
@helps.ops_argument("OP...")
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
    help="Repeat only call N of the check in --only. The first call is 0.",
)
@helps.time_limit_option("Fail a check if one call of the kernel needs more time than this.")
@click.option(
    "--sanitize",
    default="address,undefined",
    show_default=True,
    help="Also run with these sanitizers: address,undefined,leak,thread for C, "
    "memcheck,racecheck,initcheck,synccheck for CUDA. Use `none` to skip them.",
)
@click.option("-x", "--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option(
    "--last-failed",
    is_flag=True,
    help="Run only the checks that failed in the last run, or all of them if none did.",
)
@click.option(
    "--junit", type=helps.FILE, metavar="FILE", help="Also write the results as JUnit XML."
)
@click.option(
    "--emulate",
    is_flag=True,
    help="Run CUDA kernels on the CPU, and check them for races and bad addresses. Without a GPU, `--device cuda` does the same.",
)
@click.option(
    "--ranks",
    type=int,
    help="Run the op on this number of ranks and compare the results with the reference, without other checks. Ranks are "
    "CPU processes, GPUs with --device cuda, or parts of one process with --emulate.",
)
@helps.json_option
@interruptible()
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
    print_json: helps.PrintJson,
) -> None:
    """Run every check of an op.

    OP is the name or the directory of an op. The command first prints the warnings of -Wall -Wextra.
    The checks run in a child process, so if a kernel crashes, exits or never returns, only its check
    fails. If any check fails, or none runs, the exit code is 1.
    """
    from opjit.cli import diagnostics
    from opjit.emulate.checks import EMULATOR
    from opjit.testing import isolation, report
    from opjit.testing.command import Options, exit_code, run_checks
    from opjit.testing.sanitize import parse_tools

    emulated = emulate or _lacks_gpu(device)
    if ranks is not None:
        if emulated:
            from opjit.emulate import ranks as emulated_ranks

            sys.exit(emulated_ranks.run(ops, ranks))
        from opjit.testing import across_ranks

        sys.exit(across_ranks.compare_across_ranks(ops, ranks, device))
    demanded = (
        click.get_current_context().get_parameter_source("sanitize") is ParameterSource.COMMANDLINE
    )
    options = Options(
        device="cuda" if emulated else device,
        sanitizers=parse_tools(sanitize),
        only=only,
        sample=sample,
        seconds=time_limit,
        demanded=demanded,
        fail_fast=fail_fast,
        last_failed=last_failed,
        emulator=EMULATOR,
        emulated=emulated,
    )

    def warn(found: list[Any]) -> None:
        if not only and not emulated:
            isolation.apart(partial(diagnostics.show_all_warnings, found, device))

    results = run_checks(ops, options, warn)
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


@helps.command(
    "opjit bench allreduce --device cpu --only 2^20",
    "opjit bench tensor_negate --against aten::neg",
)
@helps.ops_argument("OP...")
@helps.devices_option
@click.option("--only", help="Measure only the benchmark cases with this text in their label.")
@helps.json_option
@click.option(
    "--against",
    metavar="SIDE",
    help="Compare with torch.compile, an op (aten::neg) or a function (module:name) instead of the reference.",
)
@click.option(
    "--cold/--hot",
    default=None,
    help="Measure with cold or warm hardware caches. Default: --cold on CUDA, --hot on the CPU.",
)
def bench(
    ops: tuple[str, ...],
    device: str | None,
    only: str | None,
    print_json: helps.PrintJson,
    against: str | None,
    cold: bool | None,
) -> None:
    """Compare the speed of an op with its reference in plain torch.

    OP is the name or the directory of an op. The command checks the results before it measures. In the
    table, +- is the spread of the ratio over the rounds. The rate is in B/s, or in FLOP/s if the
    benchmark case declares its operations. On CUDA, the time is device time, "host us" is the CPU time
    to issue a call, and "roof" is the reached part of the roofline.
    """
    _refuse_emulated()
    from opjit.author.bench import benchmark

    sys.exit(benchmark(ops, device, only, print_json, against, cold))


@helps.command("opjit tune ./scale_add", "opjit tune mylib::scale_add --device cuda --only 2^20")
@helps.ops_argument("OP...")
@helps.devices_option
@click.option(
    "--only", default="", help="Tune only for the benchmark cases with this text in their label."
)
@helps.json_option
def tune(ops: tuple[str, ...], device: str | None, only: str, print_json: helps.PrintJson) -> None:
    """Autotune the variants of an op in advance.

    OP is the name or the directory of an op. For each benchmark case, the command builds and measures
    all variants, and records the fastest one in the cache. Later calls with these sizes use it without
    measuring again.
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
                variant, seconds = choice or (None, None)
                outcome = f"{variant:<30} {format_time(seconds)}" if seconds else "fails"
                click.echo(f"  {each.label:<20} {outcome}")
                row = {"op": op.qualified, "device": name, "case": each.label}
                rows.append({**row, "variant": variant, "seconds": seconds})
    if print_json is not None:
        print_json(rows)


@helps.command(
    "opjit judge ./scale_add a.c b.c c.cu --json",
    "opjit judge 19_ReLU.py candidate.py",
    "opjit judge ./scale_add --lint",
)
@click.argument("task", shell_complete=helps.ops)
@click.argument(
    "candidates",
    metavar="[CANDIDATE]...",
    nargs=-1,
    type=helps.SOURCE,
)
@click.option("--op", metavar="NAME", help="Op to judge, if TASK declares several.")
@click.option(
    "--lint",
    is_flag=True,
    help="Judge no candidate. Report trivial outputs that would pass, such as zeros.",
)
@helps.device_option
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of candidates to judge in parallel. Default: a number that fits CPUs and memory.",
)
@helps.time_limit_option("Time limit of a call.")
@helps.json_lines_option
@click.option(
    "--serve",
    "socket",
    type=click.Path(path_type=Path),
    help="Read candidates from a socket at this path, one line of JSON each.",
)
@click.option(
    "--emulate",
    is_flag=True,
    help="Run CUDA code on the CPU first, to find races that don't change results. Without a GPU, `--device cuda` runs it only on the CPU.",
)
def judge(
    task: str,
    candidates: tuple[Path, ...],
    op: str | None,
    lint: bool,
    device: str | None,
    workers: int | None,
    time_limit: float,
    json_file: TextIO | None,
    socket: Path | None,
    emulate: bool,
) -> None:
    """Compile, check and time untrusted kernels.

    TASK is the name or the directory of an op, a KernelBench file, or a task.yml of GPU MODE. A
    CANDIDATE is a file with C or CUDA code for the op, or with Python code that defines ModelNew or
    custom_kernel. The exit code is 0 if every candidate got a verdict.
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
    command.run(
        Judge(
            task,
            workers=workers,
            device=device or ("cuda" if emulate else None),
            seconds=time_limit,
            op=op,
            emulate=emulate,
        ),
        candidates,
        json_file,
        socket,
    )


@helps.command("opjit wheel ./scale_add --arch x86-64-v3,x86-64-v4,sm_90")
@click.argument(
    "folders", metavar="DIRECTORY...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@helps.archs_option(
    "Architectures to build for, separated by commas. You don't need a GPU.", required=True
)
@helps.host_option
@click.option("--name", help="Name of the wheel. Default: the namespace of the ops and -ops.")
@click.option("--version", default="0.1.0", show_default=True, help="Version of the wheel.")
@click.option("-o", "--output", type=helps.FOLDER, default=".", help="Directory for the wheel.")
@interruptible()
def wheel(
    folders: tuple[Path, ...],
    archs: list[str],
    hosts: list[str],
    name: str | None,
    version: str,
    output: Path,
) -> None:
    """Build a wheel with ops and their binaries.

    The wheel contains the sources of the ops, and binaries for the architectures in --arch. On these
    architectures, users don't need a compiler. On any other, opjit builds the ops from the sources.
    """
    from opjit.author.wheel import make

    click.echo(make(folders, archs, output, name, version, hosts))

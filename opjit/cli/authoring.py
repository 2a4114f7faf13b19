"""The commands for authors of ops: new, test, bench, tune, judge and wheel."""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click
from click import IntRange, UsageError, argument, echo, option
from click.core import ParameterSource

from opjit.cli.help import (
    FILE,
    FOLDER,
    SOURCE,
    PrintJson,
    archs_option,
    checks,
    device_option,
    devices_option,
    flag,
    host_option,
    interruptible,
    json_lines_option,
    json_option,
    ops,
    ops_argument,
    subcommand,
    time_limit_option,
)
from opjit.environment import is_on
from opjit.errors import BadSetting

_KIND = click.Choice(["elementwise", "reduction", "in-place", "list", "half"])


@subcommand(
    "opjit new mylib::scale_add --backward --cuda",
    "opjit new mylib::row_norm --kind reduction",
    "opjit new --project mylib",
    declares=False,
)
@argument("name", metavar="NAMESPACE::NAME|PROJECT|DEVICE")
@argument("directory", type=FOLDER, default=".")
@option(
    "--kind",
    type=_KIND,
    help="Kind of the op. Default: elementwise, or a question on a terminal. The other kinds cannot be combined with --backward or --cuda.",
)
@flag("--backward", "Add a backward for autograd.")
@flag("--cuda", "Add a CUDA kernel.")
@flag(
    "--project",
    "Write a project: a package with an op, and a build hook that puts binaries into its wheel.",
)
@flag("--backend", "Write a backend for a device, with a kernel for a bundled op.")
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
        raise UsageError(
            f"--kind {kind} cannot be combined with --backward, --cuda, --project or --backend, because it writes a C kernel for the "
            "CPU only; leave them out, and write the backward as `opjit new mylib::scale_add --backward` does"
        )
    if backend and (backward or cuda or project):
        raise UsageError("--backend cannot be combined with --backward, --cuda or --project")
    if backend:
        folder = new_backend(name, directory)
        todo = f": import {name}.backend together with the package that adds the device to torch"
    elif project:
        folder = new_project(name, directory, backward, cuda)
        # Without isolation, this very opjit and its torch build the project; neither need be on an index.
        todo = (
            f": cd {shlex.quote(str(folder))}, then pip install --no-build-isolation -e '.[test]' && pytest, "
            "then pip wheel --no-build-isolation --no-deps ."
        )
    else:
        if kind is None and not (backward or cuda) and sys.stdin.isatty():
            kind = click.prompt("kind", type=_KIND, default="elementwise")
        folder = new_op(name, directory, backward, cuda, kind or "elementwise")
        place = shlex.quote(str(folder if folder.is_absolute() else f"./{folder}"))
        todo = f"\nBuild it and run its checks: opjit test {place}"
    echo(f"wrote {folder}{todo}")


@subcommand("opjit test ./scale_add", "opjit test ./scale_add --sanitize address,undefined")
@ops_argument("OP...")
@devices_option
@option(
    "--only",
    multiple=True,
    metavar="CHECK",
    shell_complete=checks,
    help="Run only this check. Can be repeated.",
)
@option(
    "--sample",
    type=IntRange(min=0),
    metavar="N",
    help="Repeat only call N of the check in --only. The first call is 0.",
)
@time_limit_option("Fail a check if one call of the kernel needs more time than this.")
@option(
    "--sanitize",
    "sanitizers",
    default="address,undefined",
    show_default=True,
    help="Also run with these sanitizers: address,undefined,leak,thread for C, "
    "memcheck,racecheck,initcheck,synccheck for CUDA. Use `none` to skip them.",
)
@flag("-x", "--fail-fast", "Stop at the first failure.")
@flag(
    "--last-failed", "Run only the checks that failed in the last run, or all of them if none did."
)
@option("--junit", type=FILE, metavar="FILE", help="Also write the results as JUnit XML.")
@flag(
    "--emulate",
    "Run CUDA kernels on the CPU, and check them for races and bad addresses. Without a GPU, `--device cuda` does the same.",
)
@option(
    "--ranks",
    type=int,
    help="Run the op on this number of ranks and compare the results with the reference, without other checks. Ranks are "
    "CPU processes, GPUs with --device cuda, or parts of one process with --emulate.",
)
@json_option
@interruptible()
def test(
    ops: tuple[str, ...],
    device: str | None,
    sanitizers: str,
    junit: Path | None,
    emulate: bool,
    ranks: int | None,
    print_json: PrintJson,
    **chosen: Any,
) -> None:
    """Run every check of an op.

    OP is the name or the directory of an op. The command first prints the warnings of -Wall -Wextra.
    The checks run in a child process, so if a kernel crashes, exits or never returns, only its check
    fails. If a check fails, or if no check calls an op, the exit code is 1. With --only, each of these
    checks must call an op.
    """
    from opjit import backends
    from opjit.author import report
    from opjit.author.test import Options, run_checks
    from opjit.testing.sanitize import parse_tools

    lacks_gpu = device == "cuda" and backends.for_device(device).available() is not None
    emulated = emulate or lacks_gpu
    if ranks is not None:
        from opjit.emulate import ranks as emulated_ranks
        from opjit.testing.across_ranks import compare_across_ranks

        run = emulated_ranks.run if emulated else partial(compare_across_ranks, device=device)
        sys.exit(run(ops, ranks))
    source = click.get_current_context().get_parameter_source("sanitizers")
    options = Options(
        device="cuda" if emulated else device,
        sanitizers=parse_tools(sanitizers),
        demanded=source is ParameterSource.COMMANDLINE,
        emulated=emulated,
        **chosen,
    )

    results, code = run_checks(ops, options)
    if junit is not None:
        report.write_junit(results, junit)
    if print_json is not None:
        print_json([result.fields() for result in results])
    sys.exit(code)


def _refuse_emulated() -> None:
    """Raise BadSetting if kernels would run emulated in a command that measures them."""
    if is_on("OPJIT_EMULATE"):
        raise BadSetting("an emulated kernel has no time that means anything; unset OPJIT_EMULATE")


@subcommand(
    "opjit bench allreduce --device cpu --only 2^20",
    "opjit bench tensor_negate --against aten::neg",
)
@ops_argument("OP...")
@devices_option
@option("--only", help="Measure only the benchmark cases with this text in their label.")
@json_option
@option(
    "--against",
    metavar="SIDE",
    help="Compare with torch.compile, an op (aten::neg) or a function (module:name) instead of the reference.",
)
@option(
    "--cold/--hot",
    default=None,
    help="Measure with cold or warm hardware caches. Default: --cold on CUDA, --hot on the CPU.",
)
def bench(**chosen: Any) -> None:
    """Compare the speed of an op with its reference in plain torch.

    OP is the name or the directory of an op. The command checks the results before it measures. In the
    table, a speed above 1x means that the op is faster, and +- is its spread over the rounds. The rate
    is in B/s, or in FLOP/s if the benchmark case declares its operations. On CUDA, the time is device
    time, "host us" is the CPU time to issue a call, and "roof" is the reached part of the roofline.
    """
    _refuse_emulated()
    from opjit.author.bench import benchmark

    sys.exit(benchmark(**chosen))


@subcommand("opjit tune ./scale_add", "opjit tune mylib::scale_add --device cuda --only 2^20")
@ops_argument("OP...")
@devices_option
@option(
    "--only", default="", help="Tune only for the benchmark cases with this text in their label."
)
@json_option
def tune(ops: tuple[str, ...], device: str | None, only: str, print_json: PrintJson) -> None:
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
    for op, name in arguments.ops_on_devices(ops, device, partial(echo, err=True)):
        backend = backends.for_device(name)
        labels = op.declaration.labels(backend)
        echo(f"{op.qualified} has {len(labels) or 'no'} variants for {name}")
        for each in op.workloads_on(name) if labels else ():
            if only in each.label:
                choice = tuning.tune(op, backend, each.args, each.kwargs)
                variant, seconds = choice or (None, None)
                outcome = f"{variant:<30} {format_time(seconds)}" if seconds else "fails"
                echo(f"  {each.label:<20} {outcome}")
                row = {"op": op.qualified, "device": name, "case": each.label}
                rows.append({**row, "variant": variant, "seconds": seconds})
    if print_json is not None:
        print_json(rows)


@subcommand(
    "opjit judge ./scale_add a.c b.c c.cu --json",
    "opjit judge 19_ReLU.py candidate.py",
    "opjit judge ./scale_add --lint",
)
@argument("task", shell_complete=ops)
@argument(
    "candidates",
    metavar="[CANDIDATE]...",
    nargs=-1,
    type=SOURCE,
)
@option("--op", metavar="NAME", help="Op to judge, if TASK declares several.")
@flag("--lint", "Judge no candidate. Report trivial outputs that would pass, such as zeros.")
@device_option
@option(
    "--workers",
    type=IntRange(min=1),
    help="Number of candidates to judge in parallel. Default: a number that fits CPUs and memory.",
)
@time_limit_option("Time limit of a call.")
@json_lines_option
@option(
    "--serve",
    "socket",
    type=click.Path(path_type=Path),
    help="Read candidates from a socket at this path, one line of JSON each.",
)
@flag(
    "--emulate",
    "Run CUDA code on the CPU first, to find races that don't change results. Without a GPU, `--device cuda` runs it only on the CPU.",
)
def judge(
    task: str,
    candidates: tuple[Path, ...],
    op: str | None,
    lint: bool,
    device: str | None,
    json_file: TextIO | None,
    socket: Path | None,
    emulate: bool,
    **chosen: Any,
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
        raise UsageError("expected CANDIDATEs, --serve SOCKET or --lint")
    if lint:
        found = command.lint(Task(task, device or "cpu", 0, op))
        echo("\n".join(found) or "no trivial output would pass")
        sys.exit(bool(found))
    kind = device or ("cuda" if emulate else None)
    made = Judge(task, device=kind, op=op, emulate=emulate, **chosen)
    command.run(made, candidates, json_file, socket)


@subcommand("opjit wheel ./scale_add --arch x86-64-v3,x86-64-v4,sm_90")
@argument(
    "folders", metavar="DIRECTORY...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@archs_option(
    "Architectures to build for, separated by commas. You don't need a GPU.", required=True
)
@host_option
@option("--name", help="Name of the wheel. Default: the namespace of the ops and -ops.")
@option("--version", default="0.1.0", show_default=True, help="Version of the wheel.")
@option("-o", "--output", "directory", type=FOLDER, default=".", help="Directory for the wheel.")
@interruptible()
def wheel(**chosen: Any) -> None:
    """Build a wheel with ops and their binaries.

    The wheel contains the sources of the ops, and binaries for the architectures in --arch. On these
    architectures, users don't need a compiler. On any other, opjit builds the ops from the sources.
    """
    from opjit.author.wheel import make

    echo(make(**chosen))

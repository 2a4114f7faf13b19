"""The commands for existing programs and many machines: run, record, port, precompile and keygen."""

import sys
from pathlib import Path

import click
from click import UsageError, argument, echo, option

from opjit.cli.help import (
    FILE,
    FOLDER,
    SOURCE,
    PrintJson,
    archs_option,
    flag,
    host_option,
    interruptible,
    json_option,
    ops_argument,
    remark,
    reporter,
    subcommand,
)


@subcommand(
    "opjit run train.py --epochs 3",
    "opjit run setup.py build_ext --inplace",
    "opjit run --tree engines.tree serve.py",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@option(
    "--tree",
    type=FILE,
    help="Use the caches in this file from `opjit cache pack --tree`. OPJIT_TRUST must contain the public key of its signer.",
)
@argument(
    "program",
    metavar="PROGRAM|-m MODULE [ARGUMENT]...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
)
def run(program: tuple[str, ...], tree: Path | None) -> None:
    """Run a program with its C++ extensions from the cache.

    The command runs PROGRAM as python does. When the program or a child process loads an extension
    through torch, builds one with a setup.py, or uses a module of FlashInfer, opjit gets it from the
    cache. A child that ignores PYTHONPATH, as with python -I, still uses the original functions.
    """
    from opjit import adapters

    variables = {}
    if tree is not None:
        from opjit.cache import trees

        variables = trees.open_tree(tree)
    adapters.run_program(program, variables)


@subcommand("opjit record -o ops.json -- python train.py")
@option(
    "-o",
    "--output",
    type=FILE,
    default="ops.json",
    show_default=True,
    help="Op list for `opjit precompile --from`.",
)
@argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def record(output: Path, command: tuple[str, ...]) -> None:
    """Record the ops and C++ extensions that a program uses.

    The command runs COMMAND, and writes an op list that also covers its child processes. It exits with
    the exit code of COMMAND. The list also has FlashInfer's modules under `opjit run`, and Triton's
    kernels with TRITON_CACHE_MANAGER=opjit.adapters.triton:Manager.
    """
    from opjit.ahead.record import record as record_ops
    from opjit.declare.oplist import read_list

    code = record_ops(command, output)
    ops, extensions = read_list(output)
    hint = "" if ops or extensions else "; the program called no op and loaded no C++ extension"
    remark(f"wrote {output}: {len(ops)} ops, {len(extensions)} extensions and kernels{hint}")
    sys.exit(code)


@subcommand("opjit port roi_pool.cu", "opjit port roi_pool.cu nms.cu --json", declares=False)
@argument("files", metavar="FILE...", nargs=-1, required=True, type=SOURCE)
@json_option
def port(files: tuple[Path, ...], print_json: PrintJson) -> None:
    """List the edits that C++ and CUDA code for old versions of torch needs.

    The command finds THC, AT_CHECK, .type(), .data<T>(), Caffe's headers and more. It prints a line
    for each edit, and changes no file.
    """
    from opjit.author.port import find_edits

    edits = [edit for file in files for edit in find_edits(file)]
    if print_json is not None:
        print_json([edit._asdict() for edit in edits])
        return
    for edit in edits:
        echo(edit)
    remark(f"{len(edits)} edits in {len(files)} files")


@subcommand(
    "opjit precompile --all --arch x86-64-v3,sm_80,sm_90",
    "opjit precompile --from ops.json --store /opt/opjit",
    "opjit precompile --check ops.json --store /opt/opjit",
    "opjit precompile --warm-compilers --store /opt/opjit",
)
@ops_argument("[OP]...")
@flag("--all", "everything", "Build all ops: bundled, in OPJIT_PATH and in installed packages.")
@option(
    "--from",
    "recorded",
    metavar="FILE",
    type=FILE,
    help="Build the ops in this op list, which `opjit record` writes.",
)
@option(
    "--check",
    metavar="FILE",
    type=FILE,
    help="Build nothing. Verify that every entry of this op list is cached, and list the missing entries.",
)
@archs_option(
    "Architectures to build for, separated by commas. You don't need a GPU. Default: this machine's."
)
@host_option
@option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Largest number of parallel builds. Default: $OPJIT_JOBS, or a number that fits CPUs and memory.",
)
@flag(
    "--extensions",
    "Also build the C++ extensions of the list. Use it only if you trust the list, because its flags can run any code.",
)
@flag(
    "--warm-compilers",
    "Precompile the parts that all builds on this machine share, for example torch's headers, so that no later build has to.",
)
@option(
    "--store",
    metavar="DIR",
    type=FOLDER,
    help="Write into this directory instead of the cache, for an image or for OPJIT_LAYERS. All users can read it.",
)
@json_option
@interruptible()
def precompile(
    ops: tuple[str, ...],
    everything: bool,
    recorded: Path | None,
    check: Path | None,
    archs: list[str],
    hosts: list[str],
    jobs: int | None,
    extensions: bool,
    warm_compilers: bool,
    store: Path | None,
    print_json: PrintJson,
) -> None:
    """Build ops in advance, for any architecture.

    OP is the name or the directory of an op. If the command is interrupted, run it again to continue. The
    exit code is 1 if a build fails.
    """
    from opjit.ahead.compiler_parts import make_parts
    from opjit.ahead.plan import plan_ops, plan_recorded
    from opjit.ahead.precompile import build_plan, check_precompiled, error_texts

    chosen = (ops, everything, recorded, check, warm_compilers)
    if sum(map(bool, chosen)) != 1:
        raise UsageError("expected OPs, --all, --from FILE, --check FILE or --warm-compilers")
    if extensions and recorded is None and check is None:
        raise UsageError("--extensions needs --from FILE, an op list from `opjit record`")
    if check is not None:
        count = check_precompiled(check, archs, store=store, extensions=extensions, hosts=hosts)
        echo(f"all {count} entries of {check} are there")
        return
    listed = recorded and plan_recorded(recorded, archs, store, extensions, hosts)
    plan = listed or plan_ops(None if everything else ops, archs, store, hosts)
    for text in plan.remarks:
        remark(text)
    if warm_compilers:
        make_parts(plan.store, remark)
    report = build_plan(plan, jobs, sys.stdout, reporter())
    for complaint in error_texts(report.failed):
        echo(f"Error: {complaint}", err=True)
    if print_json is None:
        echo(report)
    else:
        failed = {name: str(error) for name, error in report.failed}
        built, there = (list(map(str, each)) for each in (report.built, report.there))
        print_json({**report._asdict(), "built": built, "there": there, "failed": failed})
    sys.exit(bool(report.failed))


@subcommand("opjit keygen ci keys", declares=False)
@argument("name")
@argument("directory", type=FOLDER, default=".")
def keygen(name: str, directory: Path) -> None:
    """Make a key pair that signs entries.

    The command writes NAME.key and NAME.pub into DIRECTORY. Keep NAME.key secret, and give NAME.pub
    to everyone who should trust your entries.
    """
    from opjit.share import trust

    private, public = trust.keygen(name, directory)
    echo(
        f"{private} signs entries: opjit cache push --sign {private}. Keep it secret.\n"
        f"To trust these entries, set OPJIT_TRUST to {directory / name}.pub, or to the key itself:\n"
        f"export OPJIT_TRUST={public}"
    )

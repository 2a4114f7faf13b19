"""The command ``opjit``. Each command is a few lines over the library; nothing is done here that Python code could not do."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from opjit import __version__, cli_json
from opjit.cli_cache import cache
from opjit.errors import CacheWarning, OpjitError

_format = warnings.formatwarning  # as whoever ran this process left it


class _Commands(click.Group):
    """Shows opjit's own errors as their message, which is written for the person at the terminal, and an op.py's without opjit's lines."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OpjitError as error:
            raise click.ClickException(str(error)) from error
        except Exception as error:
            told = _of_an_op_py(error)
            if told is None:
                raise
            raise click.ClickException(told) from error


def _of_an_op_py(error: Exception) -> str | None:
    """What to show of an error that an op.py raised while it ran: its own lines and those under them; None of any other."""
    from opjit import catalog

    folder = next((frame.f_locals["folder"] for frame, _ in traceback.walk_tb(error.__traceback__)
                   if frame.f_code is catalog.declare_folder.__code__), None)
    if folder is None:
        return None
    file = str(folder / "op.py")
    lines = traceback.extract_tb(error.__traceback__)
    own = next((index for index, line in enumerate(lines) if line.filename == file), len(lines))
    place = traceback.format_exception_only(error)[:-1] if isinstance(error, SyntaxError) else []
    shown = "".join([*traceback.format_list(lines[own:]), *place])
    return f"{file} raised {type(error).__name__}: {error}\n{shown}".rstrip()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Write a torch operator in plain C or CUDA C: built on first use, cached, verified and shared."""
    warnings.formatwarning = _formatted


def _formatted(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning of opjit's as its text, which is written for the person at the terminal; any other as it would be."""
    return f"Warning: {message}\n" if issubclass(category, CacheWarning) else _format(message, category, filename, lineno, line)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, as from a job scheduler, and SIGHUP end a command that builds as Ctrl-C does: with its compilers, and nothing half done.

    Not one that runs kernels: a loop in C that has no end would not end at SIGTERM then. Nor one that a program calls in a thread.
    """
    received = signal.SIGINT
    ours = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    heeded = [number for number in ours if signal.getsignal(number) is signal.SIG_DFL]  # else nohup's

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)  # a second one would cut the end short
        raise KeyboardInterrupt

    for number in heeded:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"interrupted by {received.name}; what was built stays, and the same command goes on from there", err=True)
        sys.exit(128 + received)
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


main.add_command(cache)


@main.command()
def demo() -> None:
    """Build an op cold, load it warm, call it, and compare it with torch, on every device there is."""
    from opjit.demo import show

    sys.exit(show())


@main.command(name="list")
@cli_json.option
def list_ops(tell: cli_json.Tell) -> None:
    """Show the declared ops, their backends and schemas."""
    from opjit import catalog

    catalog.search()
    ops = catalog.all_ops()
    if tell is not None:
        tell([{"op": op.qualified, "schema": op.schema.text, "backends": op.backends(), "folder": op.folder} for op in ops])
        return
    for op in ops:
        click.echo(f"{op.qualified}  [{', '.join(op.backends())}]  {op.schema.text.partition('::')[2]}")


@main.command()
@click.argument("op")
@click.option("--device", help="Device to build for; default: the current accelerator, else the CPU.")
@click.option("--arch", help="Build for this arch (sm_90, x86-64-v3, …), whatever this machine has; nothing is loaded.")
@click.option("--build-directory", type=click.Path(file_okay=False, path_type=Path),
              help="Leave the binary with its manifest in this folder, for opjit.load_library; nothing is loaded.")
@_interruptible()
def get(op: str, device: str | None, arch: str | None, build_directory: Path | None) -> None:
    """Build OP, an op's name or the folder of one, if no cache has it, and print where its binary is."""
    from opjit import api, catalog, files
    from opjit.library import build_library

    if build_directory is not None:
        for found in catalog.named(op):
            click.echo(build_library(found.qualified, build_directory, device, arch))
        return
    target = api.wanted(device, arch)
    for found in catalog.named(op):
        entry = api.entry(found, target)
        if files.is_own(entry.folder):
            raise OpjitError(f"{found.qualified} for {target} was built, but no cache can keep it, so it goes when this command ends; set "
                             "OPJIT_CACHE to a folder of your own, or give --build-directory")
        if arch is None:
            api.ready(found, target.backend, entry)
        click.echo(entry.library)


@main.command()
@click.argument("op")
@click.option("--device", help="Device that would run it; default: the current accelerator, else the CPU.")
@click.option("--arch", help="Ask for this arch (sm_90, x86-64-v3, …), whatever this machine has.")
@click.option("--against", metavar="KEY", help="Compare with the entry whose key starts so; default: the nearest.")
@cli_json.option
def why(op: str, device: str | None, arch: str | None, against: str | None, tell: cli_json.Tell) -> None:
    """Tell whether a request for OP, an op's name or the folder of one, would hit or miss, and which input changed if it misses.

    C++ extensions (opjit.load) are not looked at.
    """
    from opjit import catalog
    from opjit.why import explain

    explanations = (explain(found, device, arch, against) for found in catalog.named(op))
    if tell is not None:
        tell([explanation.fields() for explanation in explanations])
        return
    for explanation in explanations:
        click.echo(explanation)


@main.command()
@cli_json.option
def doctor(tell: cli_json.Tell) -> None:
    """Find out what on this machine keeps ops from being built, cached or loaded; exit code 1 if something does."""
    from opjit import doctor as checks

    checks.main(tell)


@main.command()
@click.argument("name", metavar="NAMESPACE::NAME|PROJECT|DEVICE")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=".")
@click.option("--backward", is_flag=True, help="With a backward for autograd.")
@click.option("--cuda", is_flag=True, help="With a CUDA kernel beside the C one.")
@click.option("--project", is_flag=True, help="NAME is a project: a package with an op in it, whose wheel holds binaries.")
@click.option("--backend", is_flag=True, help="NAME is a device: a backend object for it, with a kernel for an op of opjit's.")
def new(name: str, directory: Path, backward: bool, cuda: bool, project: bool, backend: bool) -> None:
    """Write a folder for a new op into DIRECTORY: op.py, kernels and a test, which build and pass as they are."""
    from opjit.scaffold import new_backend, new_op, new_project

    if backend:
        if backward or cuda or project:
            raise click.UsageError("--backend goes with none of --backward, --cuda and --project")
        folder = new_backend(name, directory)
        click.echo(f"{folder} is there: import {name}.backend beside the package that gives torch the device")
        return
    if project:
        folder = new_project(name, directory, backward, cuda)
        # Without isolation: the build backend is this very opjit, with its torch, which need not be on any index.
        click.echo(f"{folder} is there: cd {shlex.quote(str(folder))}, then pip install --no-build-isolation -e '.[test]' && pytest, "
                   "then pip wheel --no-build-isolation --no-deps .")
        return
    folder = new_op(name, directory, backward, cuda)
    place = shlex.quote(f"{folder}" if folder.is_absolute() else f"./{folder}")
    click.echo(f"{folder} is there: opjit get {place}, then opjit test {place}, then opjit bench {place}")


@main.command()
@click.argument("ops", metavar="OP...", nargs=-1, required=True)
@click.option("--device", help="Device to test on; default: every one there is that the op has a kernel for.")
@click.option("--sanitize", default="", help="Also run the samples under address,undefined (C) or memcheck,racecheck,initcheck (CUDA).")
def test(ops: tuple[str, ...], device: str | None, sanitize: str) -> None:
    """Check each OP, an op's name or the folder of one, in every way there is; exit code 1 if a check fails."""
    from opjit.sanitize import parse
    from opjit.testing import run

    sys.exit(run(ops, device, parse(sanitize)))


@main.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--arch", required=True, help="Archs to build for, with commas: x86-64-v3,x86-64-v4,sm_80,sm_90. No GPU is needed.")
@click.option("--name", help="The wheel's name; default: the ops' one namespace, and -ops.")
@click.option("--version", default="0.1.0", show_default=True, help="The wheel's version.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=".", help="Folder for the wheel.")
@_interruptible()
def wheel(folders: tuple[Path, ...], arch: str, name: str | None, version: str, output: Path) -> None:
    """Make a wheel of op FOLDERs: sources, and binaries for the archs, which need no compiler where they are installed."""
    from opjit.wheel import make

    click.echo(make(folders, [each.strip() for each in arch.split(",")], output, name, version))


@main.command()
@click.argument("ops", metavar="[OP]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every op that is bundled, in OPJIT_PATH, or of an installed package.")
@click.option("--from", "recorded", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="The ops, and their archs, of a list that `opjit record` wrote.")
@click.option("--arch", default="", help="Archs with commas: x86-64-v3,x86-64-v4,sm_80,sm_90. No GPU is needed. Default: this machine's.")
@click.option("--jobs", type=click.IntRange(min=1), help="Builds at once; default: $OPJIT_JOBS, else what CPUs and memory allow.")
@click.option("--store", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
              help="Fill this store in place of the cache, for an image or for OPJIT_LAYERS; everybody may read it.")
@_interruptible()
def precompile(ops: tuple[str, ...], everything: bool, recorded: Path | None, arch: str, jobs: int | None, store: Path | None) -> None:
    """Build each OP, an op's name or the folder of one, before it is asked for; exit code 1 if one cannot be built."""
    from opjit import ahead, display

    if bool(ops) + everything + (recorded is not None) != 1:
        raise click.UsageError("name OPs, or give --all, or --from FILE")
    archs = [each.strip() for each in arch.split(",")] if arch else []
    work = ahead.listed(recorded, archs, store) if recorded is not None else ahead.ordered(ops or None, archs, store)
    for remark in work.remarks:
        click.echo(remark, err=True)
    report = ahead.run(work, jobs, lambda names: display.live(sys.stdout, names) if sys.stdout.isatty() else display.plain(click.echo))
    for complaint in ahead.complaints(report.failed):
        click.echo(f"Error: {complaint}", err=True)
    click.echo(report)
    sys.exit(1 if report.failed else 0)


@main.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default="ops.json", show_default=True,
              help="The list's file, for `opjit precompile --from`.")
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def record(output: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND and list the ops that it uses, in all its processes; the exit code is the command's."""
    from opjit import record

    sys.exit(record.run(command, output))


@main.command()
@click.argument("name")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=".")
def keygen(name: str, directory: Path) -> None:
    """Make a pair of keys in DIRECTORY: NAME.key to sign with, and NAME.pub for those who shall trust it."""
    from opjit import trust

    private, public = trust.keygen(name, directory)
    click.echo(f"{private} signs: opjit cache push --sign {private}; keep it to yourself")
    click.echo(f"{directory / name}.pub is for those who shall trust it, by its path or as it is here:")
    click.echo(f"export OPJIT_TRUST={public}")


@main.command()
@click.argument("ops", metavar="OP...", nargs=-1, required=True)
@click.option("--device", help="Device to measure on; default: every one there is that the op has a kernel for.")
@click.option("--only", help="Measure only the workloads whose label contains this text.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the numbers to this file.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path),
              help="Also draw ratio and bandwidth into this PNG file (needs matplotlib: pip install 'opjit[plot]').")
def bench(ops: tuple[str, ...], device: str | None, only: str | None, json_file: Path | None, plot_file: Path | None) -> None:
    """Measure each OP, an op's name or the folder of one, against its reference in plain torch, after checking that both agree."""
    from opjit.bench import run

    for file in filter(None, (json_file, plot_file)):
        if not file.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder {str(file.parent)!r}; make it first")

    sys.exit(run(ops, device, only, json_file, plot_file))

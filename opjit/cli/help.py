"""Help of the command line: first steps, groups of commands, examples, shell completion, and options that several commands share."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem

from opjit import progress
from opjit.errors import CacheWarning, CompileWarning, DeclarationError

_QUIET = "opjit.quiet"  # the names in a context's meta
_VERBOSE = "opjit.verbose"
_OUTPUT = "opjit.output"

FIRST_STEPS = """\
opjit: torch operators in plain C or CUDA C, built on first use.

  opjit demo                     build, load, check and time an op
  opjit new mylib::scale_add     write a new op, to start from
  opjit test ./scale_add         build it, and check it against its reference
  opjit doctor                   find out why this machine cannot build

Use opjit --help for all commands, and opjit COMMAND --help for examples.
"""
# A function that prints a document, or None without --json.
PrintJson = Callable[[object], None] | None
FILE = click.Path(dir_okay=False, path_type=Path)
SOURCE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


class Command(click.Command):
    """A command or a group with the options that all of them have: -h, -q and -v."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for name, (callback, text) in _COMMON.items():
            option = click.Option(
                [f"-{name[0]}", f"--{name}"],
                is_flag=True,
                expose_value=False,
                callback=callback,
                help=text,
            )
            self.params.append(option)


class OpCommand(Command):
    """A command that declares all ops when it runs. Help and completion don't, so they don't import torch."""

    def invoke(self, ctx: click.Context) -> Any:
        named = ctx.params.get("ops", ())
        if len(named) == 1 and os.sep in named[0] and "://" not in named[0]:
            place = os.path.abspath(named[0])
            if not os.path.exists(place):  # before torch is imported, which takes seconds
                raise DeclarationError(f"there is no directory {place}")
        from opjit import api

        api.declare_all()
        return super().invoke(ctx)


class Group(Command, click.Group):
    """A group with its commands under headings. Their summaries are the first sentences of their docstrings."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sections: dict[str, list[str]] = {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Register commands under a heading."""
        for each in commands:
            self.add_command(each)
        self.sections[title] = [str(each.name) for each in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(80)) for name in names]
                )


def command(
    *lines: str, name: str | None = None, declares: bool = True, **settings: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Make the decorated function a command with these example lines.

    With `declares`, all ops are declared before it runs.
    """
    kind = OpCommand if declares else Command
    examples = "\n  ".join(("\b\nExamples:", *lines))
    return click.command(name, cls=kind, epilog=examples, **settings)


def _be_quiet(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    ctx.with_resource(progress.on(progress.STATUS, lambda text: None))
    ctx.with_resource(warnings.catch_warnings())
    warnings.simplefilter("ignore", CompileWarning)
    warnings.simplefilter("ignore", CacheWarning)
    ctx.meta[_QUIET] = True


def _be_verbose(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    before = os.environ.get("OPJIT_VERBOSE", "")
    ctx.call_on_close(lambda: os.environ.update(OPJIT_VERBOSE=before))
    os.environ["OPJIT_VERBOSE"] = "1"  # child processes inherit it
    ctx.meta[_VERBOSE] = True


_COMMON = {
    "quiet": (_be_quiet, "Print results and errors only, without progress and warnings."),
    "verbose": (_be_verbose, "Report each step to stderr, as OPJIT_VERBOSE=1 does."),
}


def is_verbose() -> bool:
    """Return whether the running command has -v."""
    return _VERBOSE in click.get_current_context().meta


def remark(text: object) -> None:
    """Print a remark to stderr, unless the command has -q."""
    if not _is_quiet():
        click.echo(text, err=True)


def reporter() -> Callable[[str], None]:
    """Return a function for any thread that prints the command's progress, unless the command has -q."""
    return (lambda text: None) if _is_quiet() else click.echo


def _is_quiet() -> bool:
    return _QUIET in click.get_current_context().meta


def path_option(
    name: str, place: str, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that prints the path of a directory in this package and ends the command."""

    def show(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        from opjit import resources

        if asked:
            top, _slash, inner = place.partition("/")
            click.echo(resources.folder(top) / inner)
            ctx.exit()

    return click.option(
        name, is_flag=True, is_eager=True, expose_value=False, callback=show, help=text
    )


def ops(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of ops, or directories if the word contains a slash."""
    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="dir")]
    from opjit import api
    from opjit.catalog import registry

    api.declare_all()
    registry.search()
    names = [op.qualified.removeprefix("opjit::") for op in registry.all_ops()]
    return _matching(names, incomplete)


def _matching(names: list[str], incomplete: str, before: str = "") -> list[CompletionItem]:
    return [CompletionItem(before + name) for name in names if name.startswith(incomplete)]


def archs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the architectures of all devices, one or several."""
    from opjit import api, backends

    api.declare_all()
    before, comma, last = incomplete.rpartition(",")
    known = [arch for backend in backends.all_backends() for arch in backend.archs()]
    return _matching(known, last, before + comma)


def devices(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from opjit import api, backends

    api.declare_all()
    return _matching([backend.name for backend in backends.all_backends()], incomplete)


def checks(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the checks of ``opjit test``."""
    from opjit import testing
    from opjit.emulate.checks import EMULATOR

    return _matching([check.name for check in (*testing.CHECKS, *EMULATOR.checks)], incomplete)


def _keep_output(ctx: click.Context, _: click.Parameter, file: Any) -> None:
    ctx.meta[_OUTPUT] = file


def _json_stream(ctx: click.Context, _: click.Parameter, asked: bool) -> TextIO | None:
    """Return the file for JSON; None without --json.

    If it is stdout, all other output of Python, for example of an op.py, goes to stderr.
    """
    file = ctx.meta[_OUTPUT]
    if not asked:
        if file is not None:
            file.close()
            raise click.UsageError("--output needs --json")
        return None
    if file is not None:
        file.truncate(0)
        return file  # type: ignore[no-any-return]
    stdout = sys.stdout
    ctx.with_resource(redirect_stdout(sys.stderr))
    return stdout


def _json_printer(ctx: click.Context, parameter: click.Parameter, asked: bool) -> PrintJson:
    stream = _json_stream(ctx, parameter, asked)
    if stream is None:
        return None
    return lambda document: click.echo(json.dumps(document, indent=1, default=str), file=stream)


def _json_options(
    name: str, callback: Callable[..., Any], text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = click.option("--json", name, is_flag=True, callback=callback, help=text)
    file = click.option(
        "--output",
        type=click.File("a", encoding="utf-8"),  # which changes nothing yet
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_keep_output,
        help="Write the JSON to this file instead of stdout.",
    )
    return lambda function: flag(file(function))


json_option = _json_options("print_json", _json_printer, "Print one JSON document to stdout.")
json_lines_option = _json_options("json_file", _json_stream, "Print lines of JSON to stdout.")


def ops_argument(metavar: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An argument of ops: at least one if its metavar starts with OP."""
    return click.argument(
        "ops",
        metavar=metavar,
        nargs=-1,
        shell_complete=ops,
        required=metavar.startswith("OP"),
    )


def _device_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    text = f"Device to use. Default: {default}."
    return click.option("--device", shell_complete=devices, help=text)


device_option = _device_option("the current accelerator, or the CPU")
devices_option = _device_option("every available device that the op supports")


def split(_: click.Context, __: click.Parameter, text: str | None) -> list[str]:
    """Return the words of a list that commas separate."""
    return [word.strip() for word in text.split(",")] if text else []


def archs_option(text: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --arch for a list of architectures."""
    return click.option(
        "--arch", "archs", shell_complete=archs, callback=split, help=text, **settings
    )


def time_limit_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --time-limit for one call of a kernel."""
    return click.option(
        "--time-limit",
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help=text,
    )


host_option = click.option(
    "--host",
    "hosts",
    metavar="CPUS",
    default="",
    callback=split,
    help="Host CPUs of the machines with the GPUs, for example x86_64,aarch64. Default: this machine's.",
)

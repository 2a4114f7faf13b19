"""Help of the command line: first steps, groups of commands, examples, shell completion, and options that several commands share."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import click
from click import Context, Parameter, echo, get_current_context
from click.shell_completion import CompletionItem

from opjit import processes, progress
from opjit.errors import CacheWarning, CompileWarning, DeclarationError

if TYPE_CHECKING:  # help and completion don't import torch
    from opjit.backends import Backend

_QUIET = "opjit.quiet"  # the names in a context's meta
_OUTPUT = "opjit.output"

FIRST_STEPS = """\
opjit: torch operators in plain C or CUDA C, built on first use.

  opjit demo                     build, load, check and time an op
  opjit new mylib::scale_add     write a new op, to start from
  opjit test ./scale_add         build it, and check it against its reference
  opjit doctor                   find out why this machine cannot build

Use opjit --help for all commands, and opjit COMMAND --help for examples.
"""
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Completion = Callable[[Context, Parameter, str], list[CompletionItem]]
# A function that prints a document, or None without --json.
PrintJson = Callable[[object], None] | None
FILE = click.Path(dir_okay=False, path_type=Path)
SOURCE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


class Command(click.Command):
    """A command or a group with the options that all of them have: -h, -q and -v.

    With `declares`, all ops are declared when it runs. Help and completion don't, so they don't import torch.
    """

    def __init__(self, *arguments: Any, declares: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._declares = declares
        self.params += _COMMON

    def invoke(self, ctx: Context) -> Any:
        if not self._declares:
            return super().invoke(ctx)
        named = ctx.params.get("ops", ())
        if len(named) == 1 and os.sep in named[0] and "://" not in named[0]:
            place = os.path.abspath(named[0])
            known = os.access(os.path.dirname(place), os.X_OK)
            if known and not os.path.exists(place):  # before torch is imported, which takes seconds
                raise DeclarationError(f"there is no directory {place}")
        from opjit import api

        api.declare_all()
        return super().invoke(ctx)


class Group(Command, click.Group):
    """A group with its commands under headings. Their summaries are the first sentences of their docstrings."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sections = dict[str, list[str]]()

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Register commands under a heading."""
        for each in commands:
            self.add_command(each)
        self.sections[title] = [str(each.name) for each in commands]

    def format_commands(self, ctx: Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(80)) for name in names]
                )


def subcommand(
    *lines: str, name: str | None = None, declares: bool = True, **settings: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Make the decorated function a command with these example lines.

    With `declares`, all ops are declared before it runs.
    """
    examples = "\n  ".join(("\b\nExamples:", *lines))
    return click.command(name, cls=Command, epilog=examples, declares=declares, **settings)


def _be_quiet(ctx: Context, _: Parameter, asked: bool) -> None:
    if not asked:
        return
    ctx.with_resource(progress.on(progress.STATUS, lambda text: None))
    ctx.with_resource(warnings.catch_warnings())
    warnings.simplefilter("ignore", CompileWarning)
    warnings.simplefilter("ignore", CacheWarning)
    ctx.meta[_QUIET] = True


def _be_verbose(ctx: Context, _: Parameter, asked: bool) -> None:
    if not asked:
        return
    before = os.environ.get("OPJIT_VERBOSE", "")
    ctx.call_on_close(lambda: os.environ.update(OPJIT_VERBOSE=before))
    os.environ["OPJIT_VERBOSE"] = "1"  # child processes inherit it


_COMMON = [
    click.Option(
        [f"-{name[0]}", f"--{name}"],
        is_flag=True,
        expose_value=False,
        callback=callback,
        help=text,
    )
    for name, callback, text in (
        ("quiet", _be_quiet, "Print results and errors only, without progress and warnings."),
        ("verbose", _be_verbose, "Report each step to stderr, as OPJIT_VERBOSE=1 does."),
    )
]


def remark(text: object) -> None:
    """Print a remark to stderr, unless the command has -q."""
    if _QUIET not in get_current_context().meta:
        echo(text, err=True)


def reporter() -> Callable[[str], None]:
    """Return a function for any thread that prints the command's progress, unless the command has -q."""
    is_quiet = _QUIET in get_current_context().meta
    return (lambda text: None) if is_quiet else echo


def path_option(name: str, place: str, text: str) -> Decorator:
    """An option that prints the path of a directory in this package and ends the command."""

    def show(ctx: Context, _: Parameter, asked: bool) -> None:
        from opjit import resources

        if asked:
            echo(resources.folder(place))
            ctx.exit()

    return click.option(
        name, is_flag=True, is_eager=True, expose_value=False, callback=show, help=text
    )


def _completion(known: Callable[[], Iterable[str]]) -> Completion:
    """Complete a word by known names, or the last word of a list that commas separate."""

    def complete(ctx: Context, parameter: Parameter, text: str) -> list[CompletionItem]:
        from opjit import api

        api.declare_all()
        before, comma, last = text.rpartition(",")
        return [
            CompletionItem(f"{before}{comma}{name}") for name in known() if name.startswith(last)
        ]

    return complete


def _op_names() -> Iterator[str]:
    from opjit.catalog import registry

    registry.search()
    for op in registry.all_ops():
        yield op.qualified.removeprefix("opjit::")


def _backends() -> Iterable[Backend]:
    from opjit import backends

    return backends.all_backends()


def _check_names() -> Iterator[str]:
    from opjit import testing
    from opjit.emulate import checks as emulated

    yield from map(str, (*testing.CHECKS, *testing.OPTIONAL, *emulated.CHECKS))


def ops(ctx: Context, parameter: Parameter, text: str) -> list[CompletionItem]:
    """Complete the names of ops, or directories if the word contains a slash."""
    if "/" in text or text.startswith("."):
        return [CompletionItem(text, type="dir")]
    return _completion(_op_names)(ctx, parameter, text)


archs = _completion(lambda: [arch for backend in _backends() for arch in backend.archs()])
devices = _completion(lambda: [backend.name for backend in _backends()])
checks = _completion(_check_names)


def _json_stream(ctx: Context, _: Parameter, asked: bool) -> TextIO | None:
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


def _json_printer(ctx: Context, parameter: Parameter, asked: bool) -> PrintJson:
    stream = _json_stream(ctx, parameter, asked)
    if stream is None:
        return None
    return lambda document: echo(json.dumps(document, indent=1, default=str), file=stream)


def _json_options(name: str, callback: Callable[..., Any], text: str) -> Decorator:
    flag = click.option("--json", name, is_flag=True, callback=callback, help=text)
    file = click.option(
        "--output",
        type=click.File("a", encoding="utf-8"),  # which changes nothing yet
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=lambda ctx, _, file: ctx.meta.update({_OUTPUT: file}),
        help="Write the JSON to this file instead of stdout.",
    )
    return lambda function: flag(file(function))


json_option = _json_options("print_json", _json_printer, "Print one JSON document to stdout.")
json_lines_option = _json_options("json_file", _json_stream, "Print lines of JSON to stdout.")


def ops_argument(metavar: str) -> Decorator:
    """An argument of ops: at least one if its metavar starts with OP."""
    return click.argument(
        "ops",
        metavar=metavar,
        nargs=-1,
        shell_complete=ops,
        required=metavar.startswith("OP"),
    )


def flag(*names: str) -> Decorator:
    """An option without a value; the last name is its help."""
    return click.option(*names[:-1], is_flag=True, help=names[-1])


def _device_option(default: str) -> Decorator:
    text = f"Device to use. Default: {default}."
    return click.option("--device", shell_complete=devices, help=text)


device_option = _device_option("the current accelerator, or the CPU")
devices_option = _device_option("every available device that the op supports")


def split(_: Context, __: Parameter, text: str | None) -> list[str]:
    """Return the words of a list that commas separate."""
    return [word.strip() for word in text.split(",")] if text else []


def archs_option(text: str, **settings: Any) -> Decorator:
    """The option --arch for a list of architectures."""
    return click.option(
        "--arch", "archs", shell_complete=archs, callback=split, help=text, **settings
    )


def time_limit_option(text: str) -> Decorator:
    """The option --time-limit for one call of a kernel."""
    return click.option(
        "--time-limit",
        "seconds",
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGHUP and SIGTERM, which job schedulers send, like Ctrl-C: end the compilers, and leave no partial results.

    This is for commands that build. Commands that run kernels keep the default, because Python cannot interrupt an endless loop in C.
    """
    received = signal.SIGINT

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        raise KeyboardInterrupt

    # nohup ignores SIGHUP.
    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    try:
        with processes.handling(heeded, interrupt):
            yield
    except KeyboardInterrupt:
        echo(
            f"interrupted by {received.name}; finished builds are kept, and the same command continues from there",
            err=True,
        )
        sys.exit(128 + received)

"""Help of the command line: first steps, groups of commands, examples, shell completion, and options that several commands share."""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

# The commands under each heading. Their summaries are the first sentences of their docstrings.
SECTIONS = {
    "Start": ["demo", "list", "get", "doctor", "help"],
    "Write an op": ["new", "test", "bench", "tune", "judge", "wheel"],
    "Existing programs": ["run", "record", "why"],
    "Many machines": ["precompile", "cache", "keygen"],
    "Inspect": ["path", "ls", "stats", "verify"],
    "Maintain": ["prune", "clear"],
    "Exchange": ["push", "pull", "pack", "unpack"],
}
FIRST_STEPS = """\
opjit: torch operators in plain C or CUDA C, built on first use.

  opjit demo                     build, load, check and time an op
  opjit new mylib::scale_add     write a new op, to start from
  opjit test ./scale_add         build it, and check it against its reference
  opjit doctor                   find out why this machine cannot build

Use opjit --help for all commands, and opjit COMMAND --help for examples.
"""
PrintJson = (
    Callable[[object], None] | None
)  # None without --json, otherwise a function that prints a document
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


def examples(*lines: str) -> str:
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


class OpCommand(click.Command):
    """A command that declares all ops when it runs. Help and completion don't, so they don't import torch."""

    def invoke(self, ctx: click.Context) -> Any:
        from opjit import api

        api.declare_all()
        return super().invoke(ctx)


class Group(click.Group):
    command_class = OpCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            if names[0] in self.commands:
                with formatter.section(title):
                    formatter.write_dl(
                        [(name, self.commands[name].get_short_help_str(80)) for name in names]
                    )


def print_include(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from opjit.resources import include_path

        click.echo(include_path())
        ctx.exit()


def ops(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of ops, or directories if the word contains a slash."""
    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="dir")]
    from opjit import api
    from opjit.catalog import registry

    api.declare_all()
    registry.search()
    names = [op.qualified.removeprefix("opjit::") for op in registry.all_ops()]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def archs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the architectures of all devices, one or several."""
    from opjit import api, backends

    api.declare_all()
    before, comma, last = incomplete.rpartition(",")
    known = [arch for backend in backends.all_backends() for arch in backend.archs()]
    return [CompletionItem(f"{before}{comma}{arch}") for arch in known if arch.startswith(last)]


def devices(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from opjit import api, backends

    api.declare_all()
    return [
        CompletionItem(backend.name)
        for backend in backends.all_backends()
        if backend.name.startswith(incomplete)
    ]


def checks(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the checks of ``opjit test``."""
    from opjit import testing

    names = [check.name for check in testing.CHECKS]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _json_printer(ctx: click.Context, _: click.Parameter, asked: bool) -> PrintJson:
    """Redirect all other output of Python, for example of an op.py, to stderr."""
    if not asked:
        return None
    stdout = sys.stdout
    ctx.with_resource(redirect_stdout(sys.stderr))
    return lambda document: click.echo(json.dumps(document, indent=1, default=str), file=stdout)


json_option = click.option(
    "--json",
    "print_json",
    is_flag=True,
    callback=_json_printer,
    help="Print one JSON document to stdout.",
)
device_option = click.option(
    "--device",
    shell_complete=devices,
    help="Device to use. Default: the current accelerator, or the CPU.",
)
host_option = click.option(
    "--host",
    "hosts",
    metavar="CPUS",
    default="",
    callback=lambda _, __, text: text.replace(" ", "").split(",") if text else [],
    help="Host CPUs of the machines with the GPUs, for example x86_64,aarch64. Default: this machine's.",
)
devices_option = click.option(
    "--device",
    shell_complete=devices,
    help="Device to use. Default: every available device that the op supports.",
)

"""What the command line says of itself: first steps, groups of commands, an example for each, versions, and completion in a shell."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

# The commands under each heading; what they do is the first sentence of their docstrings.
SECTIONS = {
    "Start": ["demo", "list", "get", "doctor"],
    "Write an op": ["new", "test", "bench", "judge", "wheel"],
    "Existing programs": ["run", "record", "why"],
    "Many machines": ["precompile", "cache", "keygen"],
    "Inspect": ["path", "ls", "stats", "verify"],
    "Maintain": ["prune", "clear"],
    "Exchange": ["push", "pull", "pack", "unpack"],
}
FIRST_STEPS = """\
opjit: torch operators in plain C or CUDA C, built on first use.

  opjit demo                     see one built, loaded, compared and timed
  opjit new mylib::scale_add     write an op of your own, to start from
  opjit test ./scale_add         build it, and hold it against its reference
  opjit doctor                   find out why a machine cannot build

opjit --help lists every command, and opjit COMMAND --help has an example of each.
"""
EXAMPLES = {
    "demo": ["opjit demo"],
    "list": ["opjit list", "opjit list --json"],
    "get": ["opjit get allreduce", "opjit get ./scale_add --arch sm_90",
            "opjit get ./scale_add allreduce --build-directory build --name my_ops"],
    "why": ["opjit why allreduce", "opjit why allreduce --arch x86-64-v3"],
    "doctor": ["opjit doctor"],
    "new": ["opjit new mylib::scale_add --backward --cuda", "opjit new --project mylib"],
    "test": ["opjit test ./scale_add", "opjit test ./scale_add --sanitize address,undefined"],
    "bench": ["opjit bench allreduce --device cpu --only 2^20", "opjit bench tensor_negate --against aten::neg",
              "opjit bench ./scale_add --plot bench.png"],
    "judge": ["opjit judge ./scale_add a.c b.c c.cu --json -", "opjit judge 19_ReLU.py candidate.py", "opjit judge ./scale_add --lint"],
    "wheel": ["opjit wheel ./scale_add --arch x86-64-v3,x86-64-v4,sm_90"],
    "precompile": ["opjit precompile --all --arch x86-64-v3,sm_80,sm_90", "opjit precompile --from ops.json --store /opt/opjit",
                   "opjit precompile --check ops.json --store /opt/opjit"],
    "record": ["opjit record -o ops.json -- python train.py"],
    "run": ["opjit run train.py --epochs 3", "opjit run -m package.train", "opjit run setup.py build_ext --inplace"],
    "keygen": ["opjit keygen ci keys"],
    "cache path": ["opjit cache path"],
    "cache ls": ["opjit cache ls"],
    "cache stats": ["opjit cache stats"],
    "cache verify": ["opjit cache verify", "opjit cache verify --rebuild"],
    "cache prune": ["opjit cache prune --size 5GiB --age 30d"],
    "cache clear": ["opjit cache clear allreduce"],
    "cache push": ["opjit cache push s3://bucket/opjit --sign keys/ci.key"],
    "cache pull": ["opjit cache pull s3://bucket/opjit allreduce"],
    "cache pack": ["opjit cache pack ops.tar --sign keys/ci.key"],
    "cache unpack": ["opjit cache unpack ops.tar"],
}


class _Formatter(click.HelpFormatter):
    """Headings in colour, on a terminal."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, fg="green", bold=True))


class _Context(click.Context):
    formatter_class = _Formatter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            self.color = False


class _Option(click.Option):
    """An option with the heading under which a command of more than three options lists it."""

    def __init__(self, *names: Any, section: str = "", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.section = section


option = partial(click.option, cls=_Option)
FILE, FOLDER = click.Path(dir_okay=False, path_type=Path), click.Path(file_okay=False, path_type=Path)


class Command(click.Command):
    """A command without ops, and so without torch. Its help lists its options under headings and ends with its examples."""

    context_class = _Context

    def option_groups(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the options under each heading: what is typed, and what it does."""
        groups: dict[str, list[tuple[str, str]]] = {}
        many = sum(isinstance(each, click.Option) for each in self.params) > 3
        for each in self.get_params(ctx):
            if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
                groups.setdefault(getattr(each, "section", "Help") if many else "Options", []).append(record)
        return groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = self.option_groups(ctx)
        width = max(len(flag) for records in groups.values() for flag, _ in records)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl([(flag.ljust(width), meaning) for flag, meaning in records])  # one column under all headings

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        examples = EXAMPLES[ctx.command_path.partition(" ")[2]]
        with formatter.section("Example" if len(examples) == 1 else "Examples"):
            formatter.write("".join(f"{'':>{formatter.current_indent}}{line}\n" for line in examples))


class OpCommand(Command):
    """A command for which all ops are declared when it runs. Its help and completion do without."""

    def invoke(self, ctx: click.Context) -> Any:
        from opjit import api

        api.declare_all()
        return super().invoke(ctx)


class Group(click.Group):
    """A group that lists its commands under headings."""

    context_class = _Context
    command_class = OpCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            if names[0] in self.commands:
                with formatter.section(title):
                    formatter.write_dl([(name, self.commands[name].get_short_help_str(80)) for name in names])


def print_versions(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the versions that a report of a bug needs, and end."""
    if asked:
        for name, version in _versions():
            click.echo(f"{name:<7} {version}")
        ctx.exit()


def print_include(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the folder of opjit.h, and end."""
    if asked:
        from opjit.resources import include_path

        click.echo(include_path())
        ctx.exit()


def _versions() -> Iterator[tuple[str, str]]:
    import importlib.metadata

    from opjit import __version__
    from opjit.errors import ToolMissing
    from opjit.recipe import toolchain
    from opjit.store.store import default_root

    yield "opjit", __version__
    yield "python", platform.python_version()
    with suppress(importlib.metadata.PackageNotFoundError):
        yield "torch", importlib.metadata.version("torch")
    compiler = nvcc = nvrtc = None
    with suppress(ToolMissing):
        compiler = toolchain.find_compiler(None)
    with suppress(ToolMissing):
        nvcc, nvrtc = toolchain.find_nvcc(None), toolchain.find_nvrtc("", None)
    yield "cc", f"{compiler.version}, {compiler.path}" if compiler else "none; opjit doctor says more"
    yield "nvcc", f"{nvcc.build.removeprefix('V')}, {nvcc.root}" if nvcc else "none"
    yield "nvrtc", f"{nvrtc.version.partition(' ')[0]}, {nvrtc.library}" if nvrtc else "none"
    yield "cache", str(default_root())


def ops(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of ops, or folders once a word holds a slash."""
    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="dir")]
    from opjit import api
    from opjit.declare import registry

    api.declare_all()
    registry.search()
    names = [op.qualified.removeprefix("opjit::") for op in registry.all_ops()]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def archs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete archs of all devices; after a comma, the next one."""
    from opjit import api, backends

    api.declare_all()
    before, comma, last = incomplete.rpartition(",")
    known = [arch for backend in backends.all_backends() for arch in backend.archs()]
    return [CompletionItem(f"{before}{comma}{arch}") for arch in known if arch.startswith(last)]


def devices(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete kinds of devices."""
    from opjit import api, backends

    api.declare_all()
    return [CompletionItem(backend.name) for backend in backends.all_backends() if backend.name.startswith(incomplete)]

"""The command ``opjit``. Each subcommand is a few lines that call the library."""

import linecache
import os
import re
import traceback
import warnings
from itertools import dropwhile
from pathlib import Path
from typing import Any

import click
from click import ClickException, Context, echo

from opjit import __version__
from opjit.cli import authoring, basics, programs
from opjit.cli import help as helps
from opjit.cli.cache import cache
from opjit.cli.help import subcommand
from opjit.errors import (
    CacheWarning,
    CompileWarning,
    DeclarationError,
    DeviceUnavailable,
    OpjitError,
)

_ERRORS = Path(__file__).parents[1] / "ERRORS.md"
# Errors of a request that cannot be, such as an unknown op: exit code 2, as of click's errors. Code 1 means that the work failed.
_IMPOSSIBLE = (
    ValueError,
    LookupError,
    NotImplementedError,
    DeclarationError,
    DeviceUnavailable,
)
_default_format = warnings.formatwarning  # of Python, or of the program that embeds it


class _Commands(helps.Group):
    """Print only the message of an opjit error, and only the op.py part of another error's traceback."""

    def invoke(self, ctx: Context) -> Any:
        try:
            return super().invoke(ctx)
        except OpjitError as error:
            page = _ERRORS.read_text("utf-8")
            names = (kind.__name__ for kind in type(error).__mro__)
            explained = next(name for name in names if f"\n## {name}\n" in page)
            # Without a context, click prints no usage of the command.
            kind = click.UsageError if isinstance(error, _IMPOSSIBLE) else ClickException
            raise kind(f"{error}\nRun `opjit help {explained}` for causes and fixes.") from error
        except click.NoSuchOption as error:
            name = error.option_name
            if not any(name in parameter.opts for parameter in self.params):
                raise
            told = f"{name} goes before the command: opjit {name} ... COMMAND"
            raise click.UsageError(told, error.ctx) from error
        except (ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            text = _op_py_error(error)
            if text is None:
                raise
            raise ClickException(text) from error


def _op_py_error(error: Exception) -> str | None:
    """Return the text of an error that an op.py raised, with the traceback from that file on. Return None for any other error."""
    from opjit.catalog import registry

    folders = [
        frame.f_locals["folder"]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is registry.declare_folder.__code__
    ]
    if not folders:
        return None
    file = str(folders[0] / "op.py")
    own = dropwhile(lambda line: line.filename != file, traceback.extract_tb(error.__traceback__))
    place = traceback.format_exception_only(error)[:-1] if isinstance(error, SyntaxError) else []
    shown = "".join([*traceback.format_list(own), *place])
    return f"{file} raised {type(error).__name__}: {error}\n{shown}".rstrip()


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="opjit %(version)s", help="Print the version.")
@helps.path_option(
    "--include", "kernels_c", "Print the directory of opjit.h, for editors and other builds."
)
@helps.path_option(
    "--cmakedir", "templates/cmake", "Print the directory for opjit_DIR of CMake's find_package."
)
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Color the output. auto: on a terminal, unless NO_COLOR is set.",
)
@click.pass_context
def main(context: Context, color: str) -> None:
    """Write torch operators in plain C or CUDA C: built on first use, cached, verified and shared.

    \b
    To complete commands, ops and architectures in bash (or zsh, fish), run:
      eval "$(_OPJIT_COMPLETE=bash_source opjit)"
    """
    if color != "auto" or os.environ.get("NO_COLOR"):
        context.color = color == "always"
    if context.invoked_subcommand is None:
        echo(helps.FIRST_STEPS, nl=False)
    warnings.formatwarning = _format_warning  # type: ignore[assignment]  # fewer names


def _format_warning(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """Format opjit's warnings as their message, compiler warnings in the style of compilers, and other warnings as usual."""
    if issubclass(category, CacheWarning):
        return f"Warning: {message}\n"
    if not issubclass(category, CompileWarning):
        return _default_format(message, category, *place)
    file, line = place[:2]
    excerpt = linecache.getline(file, line).strip()
    return f"{file}:{line}: warning: {message}\n" + f"  {excerpt}\n" * bool(excerpt)


@subcommand("opjit help", "opjit help get", "opjit help NoKernel", name="help", declares=False)
@click.argument("words", metavar="[COMMAND|ERROR]...", nargs=-1)
@click.pass_context
def show_help(context: Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, or explain an error.

    ERROR is a class of errors, such as NoKernel.
    """
    title = re.escape(" ".join(words))
    section = rf"(?ims)^## {title}\n(.*?)(?=^## |\Z)"
    explained = re.search(section, _ERRORS.read_text("utf-8"))
    if explained:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(explained[1].strip(), hyperlinks=False))
        return
    found: click.Command = main
    shown = context.find_root()
    for word in words:
        child = found.get_command(shown, word) if isinstance(found, click.Group) else None
        if child is None:
            raise click.UsageError(
                f"expected a command or a class of errors such as NoKernel, got {word!r}; `opjit help` lists commands",
                shown,
            )
        shown = Context(child, info_name=word, parent=shown)
        found = child
    echo(found.get_help(shown))


main.add_section(
    "Start", basics.demo, basics.list_ops, basics.get, basics.why, basics.doctor, show_help
)
main.add_section(
    "Write an op",
    authoring.new,
    authoring.test,
    authoring.bench,
    authoring.tune,
    authoring.judge,
    authoring.wheel,
)
main.add_section("Existing programs", programs.run, programs.record, programs.port)
main.add_section("Many machines", programs.precompile, cache, programs.keygen)

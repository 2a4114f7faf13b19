"""Writes opjit/cli/README.md, the page of all commands and variables, from what the code says of them.

    python -m tests.reference

A test compares the page with the code."""

import inspect
import re
import textwrap
from collections.abc import Iterator

import click

from opjit.cli import main
from opjit.environment import VARIABLES
from tests.helpers import ROOT

PAGE = ROOT / "opjit/cli/README.md"
HEAD = """\
# Commands and variables

<!-- Written by `python -m tests.reference` from the code; edit there. -->

`list`, `why`, `doctor`, `cache ls` and `cache stats` take `--json` and then print one document to stdout, with the same exit code. Sizes
are in bytes, times in seconds since 1970. Field names are stable: those of `opjit.explain()`, `opjit.cache.entries()` and
`opjit.cache.stats()`. `why` reports an op's `"state"`, `"hit"` or `"miss"`; `doctor` reports `"ok"`, `"note"`, `"warning"` or `"problem"`.
`opjit bench --json FILE` writes its measurements.
"""
LOG = """
`OPJIT_VERBOSE=1`, or Python's logger `opjit` at INFO, reports where opjit found each op, why it missed the cache, and how long the build
took. DEBUG adds the compilers' commands. A process that waits for another's build reports its process, start and step.
"""


def page() -> str:
    """The page's text."""
    table = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in sorted(VARIABLES.items()))
    variables = (
        f"## Variables\n\n| variable | meaning |\n|---|---|\n{table}\n"
        "| `CC`, `CXX`, `CUDA_HOME` | the compilers, also behind a launcher (`ccache gcc`), and the CUDA Toolkit |\n"
    )
    return "\n".join([HEAD, *commands(main, "opjit"), variables]) + LOG


_FIRST = (
    "new",
    "test",
    "bench",
    "get",
    "demo",
    "list",
    "why",
)  # then the others, in the order of the code


def commands(group: click.Group, path: str) -> Iterator[str]:
    """The sections of a group's commands."""
    for name, command in sorted(
        group.commands.items(),
        key=lambda each: _FIRST.index(each[0]) if each[0] in _FIRST else len(_FIRST),
    ):
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield section(command, f"{path} {name}")


def section(command: click.Command, path: str) -> str:
    """A command's heading, text, options and examples."""
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    text = re.sub(
        r"\x08\n((?:.+\n?)+)",
        lambda verbatim: textwrap.indent(verbatim[1], "    "),
        inspect.cleandoc(command.help or ""),
    )
    records = [
        each.get_help_record(context) for each in command.params if isinstance(each, click.Option)
    ]
    options = "".join(f"- `{record[0]}`: {record[1]}\n" for record in records if record)
    examples = "\n".join(re.findall(r"^  (opjit .*)$", command.epilog or "", re.MULTILINE))
    return (
        f"## {path}\n\n```\n{path} {usage}\n```\n\n{text}\n"
        + f"\n{options}" * bool(options)
        + f"\n```sh\n{examples}\n```\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

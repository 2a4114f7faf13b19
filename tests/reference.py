"""Writes opjit/cli/README.md, the page of all commands and variables, from the help texts in the code.

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

`opjit --help` lists the commands, and `opjit COMMAND --help` prints the same text as this page. To find the command for a task, see
[How do I ...?](../../examples/README.md) OP is the name of an op, or the path of its directory.

Every command also has `-h`, `-q` and `-v`. With `-q`, a command prints results and errors only. With `-v`, it reports each step to stderr.

## Exit codes

- 0: the command did its work.
- 1: the work failed, such as a check, a build, a damaged entry, or a missing tool.
- 2: the request is impossible, such as an unknown option, op or arch, or an op without a kernel.
- 128 + N: the signal N ended the command.

`opjit run` and `opjit record` end with the exit code of their program.

## JSON output

With `--json`, a command prints one JSON document to stdout and all other output to stderr. The exit code doesn't change. To keep
the usual output, add `--output FILE`, which writes the JSON to a file:

```sh
opjit why ./scale --json | jq .state            # "hit" or "miss"
opjit test ./scale --json --output checks.json  # the table on the terminal, and the JSON in a file
```

These commands have both options: COMMANDS. `opjit judge --json` prints one line of JSON for each verdict. With `opjit doctor`,
each check is `"ok"`, `"note"`, `"warning"` or `"problem"`. The names of the fields are stable, and are the same as in `opjit.explain()`,
`opjit.cache.entries()` and `opjit.cache.stats()`. Sizes are in bytes, and times in seconds since 1970.
"""
LOG = """
With `-v`, `OPJIT_VERBOSE=1`, or if you set Python's logger `opjit` to INFO, opjit reports where it found each op, why it missed the cache,
and how long the build was. The level DEBUG adds the commands of the compilers. When a process waits for a build of another process,
it reports that process, its start and its current step.
"""


def page() -> str:
    """The page's text."""
    items = "\n".join(f"- `{name}`: {meaning}." for name, meaning in sorted(VARIABLES.items()))
    variables = (
        f"## Variables\n\n{items}\n"
        "- `CC`, `CXX`: the compilers. You can put a launcher first, as in `ccache gcc`.\n"
        "- `CUDA_HOME`: the CUDA Toolkit.\n"
    )
    head = HEAD.replace("COMMANDS", ", ".join(f"`{path}`" for path in _with_json(main, "opjit")))
    return "\n".join([_wrapped(head), *commands(main, "opjit"), variables]) + LOG


def _with_json(group: click.Group, path: str) -> Iterator[str]:
    """Yield the commands of a group that have --json."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _with_json(command, f"{path} {name}")
        elif any("--json" in parameter.opts for parameter in command.params):
            yield f"{path} {name}"


def _wrapped(text: str) -> str:
    """Wrap the paragraphs of a text, except tables, headings, code and lists."""
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(
            r"^(?![|#<\- ]).+(?:\n(?![|#<\- ]).+)*",
            lambda paragraph: textwrap.fill(
                paragraph[0], 140, break_long_words=False, break_on_hyphens=False
            ),
            parts[number],
            flags=re.MULTILINE,
        )
    return "".join(parts)


_OP = r"\bOP is the name or the directory of an op\.\s*"  # the top of the page has it
# The order of the first sections. The other commands follow in the order of the code.
_FIRST = (
    "new",
    "test",
    "bench",
    "get",
    "demo",
    "list",
    "why",
)


def commands(group: click.Group, path: str) -> Iterator[str]:
    """Yield the section of each command of a group."""
    for name, command in sorted(
        group.commands.items(),
        key=lambda each: _FIRST.index(each[0]) if each[0] in _FIRST else len(_FIRST),
    ):
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield section(command, f"{path} {name}")


def section(command: click.Command, path: str) -> str:
    """Return a command's heading, text, options and examples."""
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    text = re.sub(
        r"\x08\n((?:.+\n?)+)",
        lambda verbatim: textwrap.indent(verbatim[1], "    "),
        re.sub(_OP, "", inspect.cleandoc(command.help or "")),
    )
    records = [
        each.get_help_record(context)
        for each in command.params
        if isinstance(each, click.Option) and not _is_common(each)
    ]
    options = "".join(f"- `{record[0]}`: {record[1]}\n" for record in records if record)
    examples = "\n".join(re.findall(r"^  (opjit .*)$", command.epilog or "", re.MULTILINE))
    shown = "" if usage == "[OPTIONS]" else f"```\n{path} {usage}\n```\n\n"
    return (
        f"## {path}\n\n{shown}{_wrapped(text)}\n"
        + f"\n{options}" * bool(options)
        + f"\n```sh\n{examples}\n```\n"
    )


def _is_common(option: click.Option) -> bool:
    """Whether the top of the page describes an option."""
    return bool({"--json", "--quiet", "--verbose"} & {*option.opts}) or option.opts == ["--output"]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

"""How commands print: one JSON document for scripts; sizes, ages and counts for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

import click

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
PrintJson = Callable[[object], None] | None  # prints the document; None without --json


def _json_printer(ctx: click.Context, _: click.Parameter, asked: bool) -> PrintJson:
    """Send all else that Python prints, for example in an op.py, to stderr."""
    if not asked:
        return None
    stdout = sys.stdout
    ctx.with_resource(redirect_stdout(sys.stderr))
    return lambda document: click.echo(json.dumps(document, indent=1, default=str), file=stdout)


json_option = click.option("--json", "print_json", is_flag=True, callback=_json_printer, help="Print one JSON document, for scripts.")


def format_entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def format_size(count: float) -> str:
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"

"""``--json``: what a command found as one JSON document, for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

import click

Tell = Callable[[object], None] | None  # prints the document, where it is asked for


def dump(found: object) -> str:
    """A document; paths become texts."""
    return json.dumps(found, indent=1, default=str)


def _teller(ctx: click.Context, _: click.Parameter, asked: bool) -> Tell:
    """Whatever else Python prints, in an op.py say, goes to stderr."""
    if not asked:
        return None
    stdout = sys.stdout
    ctx.with_resource(redirect_stdout(sys.stderr))
    return lambda found: click.echo(dump(found), file=stdout)


option = click.option("--json", "tell", is_flag=True, callback=_teller, help="Print one JSON document, for scripts; see the README.")

"""Draws the README's pictures into .github/pictures.

    python tests/benchmarks/pictures.py              the charts, from results/*.json
    python tests/benchmarks/pictures.py --demo       runs `opjit demo` and draws its terminal
    python tests/benchmarks/pictures.py --cell       draws the notebook's cells with the outputs that the file keeps

A results file holds medians with their machine and the command that measured them. A test compares charts and files.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from common import HERE

PICTURES = HERE.parents[1] / ".github" / "pictures"
RESULTS = HERE / "results"
NOTEBOOK = HERE.parents[1] / "examples" / "notebook" / "prototype.ipynb"
WIDTH = 760
LABELS = 230
ROOM = 110
ROW = 22  # pixels: the picture, the names on the left, the values on the right, a bar with its gap
COLUMNS = 80
CELL = 12.2  # pixels of a character in rich's pictures
COLOURS = ("#2f6fde", "#9aa4b2")  # opjit, peers: both are visible on white and on black
STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#6b7280}.head{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#b6bec9}}</style>"
)


def chart(results: dict[str, Any]) -> str:
    """An SVG of horizontal bars, in groups, on one linear scale."""
    groups = [
        (f"{group['what']}, {group['machine']}", bars_of(group)) for group in results["groups"]
    ]
    longest = max(value for _, bars in groups for _, value in bars)
    lines = []
    y = 10
    for title, bars in groups:
        lines.append(f'<text class="head" x="0" y="{y + 14}">{title}</text>')
        y += ROW
        for name, value in bars:
            width = max(1.0, value / longest * (WIDTH - LABELS - ROOM))
            colour = COLOURS[name != "opjit"]
            lines += [
                f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{name}</text>',
                f'<rect x="{LABELS}" y="{y + 1}" width="{width:.1f}" height="{ROW - 6}" rx="2" fill="{colour}"/>',
                f'<text x="{LABELS + width + 6:.1f}" y="{y + 13}">{shown(value)} {results["unit"]}</text>',
            ]
            y += ROW
        y += 8
    for line in (results["title"], results["command"]):
        lines.append(f'<text x="0" y="{y + 12}">{line}</text>')
        y += ROW - 4
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 20}" viewBox="0 0 {WIDTH} {y + 20}">\n{STYLE}\n'
        f"{body}\n</svg>\n"
    )


def bars_of(group: dict[str, Any]) -> list[tuple[str, float]]:
    """A group's names and values: as they are, or the bandwidth from bytes and microseconds."""
    if "bars" in group:
        return [(name, value) for name, value in group["bars"]]
    return [(name, group["bytes"] / value / 1e3) for name, value in group["microseconds"]]


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def terminal() -> str:
    """An SVG of a terminal in which `opjit demo` ran."""
    from rich.console import Console

    from opjit.author.demo import show

    console = Console(
        record=True,
        width=COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        file=StringIO(),
    )
    console.print("[bold green]$[/] opjit demo")
    # The demo names the command as it was called.
    sys.argv[0] = shutil.which("opjit") or sys.argv[0]
    show(console, Console(stderr=True))
    return placed(console.export_svg(title="opjit"))


def cells() -> str:
    """An SVG of the notebook's cells that are tagged `picture`, and of the outputs of these and of those tagged `picture-output`."""
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.text import Text

    shown = [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if {"picture", "picture-output"} & set(cell["metadata"].get("tags", ()))
    ]
    lines = [
        line
        for cell in shown
        if "picture" in cell["metadata"]["tags"]
        for line in "".join(cell["source"]).splitlines()
    ]
    console = Console(
        record=True,
        width=max(map(len, lines)) + 2,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        file=StringIO(),
    )
    for cell in shown:
        if "picture" in cell["metadata"]["tags"]:
            console.print(Text(f"In [{cell['execution_count']}]:", style="blue"))
            console.print(
                Syntax("".join(cell["source"]), "c", background_color="default", theme="ansi_dark")
            )
        console.print(Text(f"Out [{cell['execution_count']}]:", style="red"))
        for text in outputs(cell):
            console.print(Text.from_ansi(text.partition("\nfull output")[0]))
    return placed(console.export_svg(title="examples/notebook/prototype.ipynb"))


def placed(svg: str) -> str:
    """A terminal's picture with each run of words at its own column: renderers without the terminal's font make spaces of another width."""

    def words(match: re.Match[str]) -> str:
        name, start, y, clip, text = match.groups()
        runs = re.finditer(r"[^\xa0\s]+(?:\xa0[^\xa0\s]+)*", html.unescape(text))
        return "".join(
            f'<text class="{name}" x="{float(start) + CELL * run.start():g}" y="{y}" textLength="{CELL * len(run[0]):g}"{clip}>'
            f"{html.escape(run[0])}</text>"
            for run in runs
        )

    return re.sub(
        r'<text class="([^"]+)" x="([^"]+)" y="([^"]+)" textLength="[^"]+"([^>]*)>([^<]*)</text>',
        words,
        svg,
    )


def outputs(cell: dict[str, Any]) -> Iterator[str]:
    """The texts that a cell shows."""
    for output in cell["outputs"]:
        if "image/png" in output.get("data", {}):
            continue
        text = output.get("text") or output.get("traceback") or output["data"]["text/plain"]
        yield "".join(text).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--cell", action="store_true")
    options = parser.parse_args()
    made = {
        path.stem: chart(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob("*.json"))
    }
    if options.demo:
        made["demo"] = terminal()
    if options.cell:
        made["cell"] = cells()
    for name, svg in made.items():
        file = Path(PICTURES / f"{name}.svg")
        file.write_text(svg, encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()

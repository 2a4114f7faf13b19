"""Run the rows of the benchmarks' results again, and compare each figure with the page's.

    python -m tests.page [WORD...]          rows that need no GPU
    python -m tests.page --gpu [WORD...]    rows that need a GPU

A row is chosen if its command or its text contains one of the words. Each command of the chosen rows runs once, in an empty cache.
A row with a peer is compared as a speed-up, because both sides are measured in the same run: it is off if the new one differs from the
page's by more than a third. A row without a peer is compared as a time, and is off by more than a factor of two, by which seconds drift.
Exit status: 1 if a row is off, a command fails or its figure cannot be found.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.page.readings import READINGS, Reading, collectives

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "benchmarks" / "RESULTS.md"
WITHIN = 4 / 3  # of speed-ups
DRIFT = 2.0  # of times without a peer
LEAST = 0.005  # of a printed ratio: "0.00" is below it
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_TIMES = re.compile(rf"((?:{_NUMBER}(?:, |; | to ))*{_NUMBER}) (s|ms|us|ns)\b")
_RATIOS = re.compile(rf"(?:1/)?({_NUMBER})(?=x| to {_NUMBER}x)")


class PageRow(NamedTuple):
    """A line of one of the page's tables."""

    section: str
    benchmark: str
    opjit: str
    baseline: str
    speed_up: str
    command: str

    @property
    def full_command(self) -> list[str]:
        """Return the command for subprocess."""
        first, *rest = shlex.split(self.command)
        if first == "python":
            return [sys.executable, *rest]
        if first == "opjit":
            return [sys.executable, "-m", "opjit", *rest]
        return [sys.executable, str(PAGE.with_name(first)), *rest]

    @property
    def script(self) -> Path:
        """Return the file that the command runs."""
        program = self.full_command[1]
        if program != "-m":
            return Path(program)
        module = ROOT.joinpath(*self.full_command[2].split("."))
        return module / "__main__.py" if module.is_dir() else module.with_suffix(".py")


class Outcome(NamedTuple):
    """A row of the page, and its new figure: `state` is "ok", "off", "failed" or "not run"."""

    row: PageRow
    state: str
    page: str
    new: str


def rows(text: str) -> list[PageRow]:
    """Parse the page's tables. Raises ValueError if a row names no command."""
    section = ""
    command = ""
    header: list[str] = []
    found = []
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not line.startswith("|"):
            header = []
            named = re.search(r"`([^`]+)`\)?:$", line)
            command = named.group(1) if named else command if line == "" else ""
            continue

        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
        elif not set(line) <= set("|- "):
            found.append(_row(section, header, cells, command))
    return found


def _row(section: str, header: list[str], cells: list[str], command: str) -> PageRow:
    if "benchmark" in header:
        by_name = dict(zip(header, cells, strict=True))
        command = by_name.get("command", command).strip("`")
        row = PageRow(
            section,
            by_name["benchmark"],
            by_name["opjit"],
            by_name.get("baseline", ""),
            by_name.get("speed-up", ""),
            command,
        )
    else:  # a table of sizes, whose command is in the sentence above
        speed_ups = [cell for name, cell in zip(header, cells, strict=True) if name == "speed-up"]
        row = PageRow(section, cells[0], f"{cells[1]} us", "", ", ".join(speed_ups), command)
    if not row.command:
        raise ValueError(f"expected a command in the row {row.benchmark!r} of {section}")
    return row


def reading(row: PageRow) -> Reading:
    """Return how the row's figure is read from its command's output. Raises KeyError if it is not known."""
    if "collectives" in row.command:
        return collectives(row.benchmark)
    known = [
        each
        for each in READINGS[row.command]
        if each.row == row.benchmark and each.baseline in row.baseline
    ]
    if len(known) != 1:
        raise KeyError(
            f"expected one reading of {row.benchmark!r} ({row.command}) in readings.py, found {len(known)}"
        )
    return known[0]


def seconds_in(cell: str) -> list[float]:
    """Return the times of a cell, in seconds: "2.4 to 3.6 us" has two."""
    return [
        float(number.replace(",", "")) * UNITS[unit]
        for numbers, unit in _TIMES.findall(cell)
        for number in re.findall(_NUMBER, numbers)
    ]


def of_page(row: PageRow) -> tuple[str, list[float]]:
    """Return "x" and the speed-ups of a row, or "s" and its times if it has no peer."""
    speed_ups = [float(number.replace(",", "")) for number in _RATIOS.findall(row.speed_up)]
    if not speed_ups and row.speed_up.endswith("x"):
        raise ValueError(f"expected a speed-up, got {row.speed_up!r}")
    if row.section == "Across GPUs":  # the command compares with the fastest peer
        return "x", [min(speed_ups)]
    if speed_ups:
        return "x", speed_ups
    ours = seconds_in(row.opjit)
    theirs = seconds_in(row.baseline)
    if ours and theirs:
        return "x", [theirs[0] / ours[0]]
    return "s", ours


def of_output(how: Reading, output: str) -> tuple[str, list[float]]:
    """Return "x" and speed-ups, "s" and times, or "" if the text has to be there. Raises ValueError if something is not there."""
    unit = ""
    values = []
    for pattern in how.patterns:
        matches = list(re.finditer(pattern, output, re.MULTILINE))
        if not matches:
            raise ValueError(f"the output has no line {pattern!r}")
        for match in matches if how.every else matches[:1]:
            groups = {name: text for name, text in match.groupdict().items() if text is not None}
            if "times" in groups:  # opjit's time over the peer's
                unit = "x"
                values.append(1 / max(float(groups["times"]), LEAST))
            elif "speed" in groups:
                unit = "x"
                values.append(float(groups["speed"]))
            elif "peer" in groups:
                unit = "x"
                values.append(_time(groups["peer"]) / _time(groups["ours"]))
            elif "ours" in groups:
                unit = "s"
                values.append(_time(groups["ours"]))
    return unit, values


def _time(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * UNITS[unit or "s"]


def judged(row: PageRow, output: str) -> Outcome:
    """Compare a row with its command's output."""
    how = reading(row)
    page_unit, page = of_page(row)
    try:
        unit, new = of_output(how, output)
    except ValueError as error:
        return Outcome(row, "failed", _shown(page_unit, page), str(error))
    if unit == "":
        return Outcome(row, "ok", row.opjit, "the same")
    if unit != page_unit:
        kinds = {"x": "a speed-up", "s": "a time"}
        message = f"expected {kinds[page_unit]}, the output has {kinds[unit]}"
        return Outcome(row, "failed", _shown(page_unit, page), message)
    if len(page) != len(new):  # a range
        page = [min(page), max(page)]
        new = [min(new), max(new)]
    allowed = WITHIN if unit == "x" else DRIFT
    is_off = any(
        max(now / before, before / now) > allowed for before, now in zip(page, new, strict=True)
    )
    return Outcome(row, "off" if is_off else "ok", _shown(unit, page), _shown(unit, new))


def _shown(unit: str, values: Iterable[float]) -> str:
    if unit == "x":
        return ", ".join(f"{value:.3g}x" for value in values)
    return ", ".join(_shown_time(value) for value in values)


def _shown_time(value: float) -> str:
    name = next((name for name, size in UNITS.items() if value >= size), "ns")
    return f"{value / UNITS[name]:.3g} {name}"


def run(row: PageRow) -> tuple[int, str]:
    """Run a row's command in an empty cache. Returns its exit status and its output."""
    with tempfile.TemporaryDirectory(prefix="opjit-page-") as cache:
        start = time.perf_counter()
        done = subprocess.run(
            row.full_command,
            cwd=ROOT,
            env={**os.environ, "OPJIT_CACHE": cache, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        spent = time.perf_counter() - start
    return done.returncode, f"{done.stdout}\nwall time {spent:.2f} s\n"


def outcomes(chosen: Sequence[PageRow]) -> Iterator[Outcome]:
    """Run the commands of these rows, each once, and compare the rows."""
    outputs: dict[str, tuple[int, str]] = {}
    for row in chosen:
        needs = reading(row).needs
        if needs:
            yield Outcome(row, "not run", row.speed_up or row.opjit, f"needs {needs}")
            continue
        if row.command not in outputs:
            print(f"running {row.command}", file=sys.stderr, flush=True)
            outputs[row.command] = run(row)
        code, output = outputs[row.command]
        outcome = judged(row, output)
        if outcome.state == "failed" and code != 0:
            last = output.strip().splitlines()[-2:][0]
            outcome = outcome._replace(new=f"exit status {code}: {last}")
        yield outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="run the rows that need a GPU")
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    parser.add_argument("words", nargs="*", help="parts of a row's command or text")
    options = parser.parse_args(arguments)
    chosen = [
        row
        for row in rows(PAGE.read_text(encoding="utf-8"))
        if reading(row).gpu == options.gpu
        and (
            not options.words
            or any(word in f"{row.command} {row.benchmark}" for word in options.words)
        )
    ]
    if not chosen:
        parser.error("no row of the page has one of these words")
    if options.list:
        for row in chosen:
            print(f"{row.command:40}{row.benchmark}")
        return 0

    counts: dict[str, int] = {}
    for outcome in outcomes(chosen):
        counts[outcome.state] = counts.get(outcome.state, 0) + 1
        print(
            f"{outcome.state:8} page {outcome.page:24} now {outcome.new:24} "
            f"{outcome.row.command}: {outcome.row.benchmark}",
            flush=True,
        )
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    return int("off" in counts or "failed" in counts)

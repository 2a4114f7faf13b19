"""Draws C++ programs, builds each with torch's own headers and the fast way, and prints those whose calls differ.

    python -m tests.cpp_extension.fuzz --minutes 60 [--seed N] [--kind overloads]

A difference is shrunk: its rules take their first productions, and its bindings go, as long as it stays.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from tests.cpp_extension.fuzz import both, grammar
from tests.cpp_extension.fuzz.both import Case, Compared, Difference

TRIES = 25  # for one difference, each with two builds


def drawn(seed: int, first: int, count: int, kind: str | None = None) -> list[int]:
    """The numbers of the next programs."""
    kinds = list(grammar.KINDS)
    return [number for number in range(first, first + count) if kind is None or kinds[number // 6 % len(kinds)] == kind]


def shrunk(difference: Difference, seed: int, folder: Path) -> Difference:
    """A smaller program that still differs."""
    number, plain, best, tries = int(difference.case.name.partition("x")[2]), frozenset[str](), difference, 0

    def still(case: Case) -> Difference | None:
        try:
            return next(iter(both.compare([case], folder).differences), None)
        except AssertionError:
            return None

    _, places = grammar.draw(seed, number)
    for place in places:
        case, _ = grammar.draw(seed, number, plain | {place})
        if tries < TRIES and case.code != best.case.code and (found := still(case)):
            best, plain = found, plain | {place}
        tries += 1
    for bind in best.case.binds if len(best.case.binds) > 2 else ():
        if tries < TRIES and (found := still(best.case._replace(binds=[one for one in best.case.binds if one != bind]))):
            best = found
        tries += 1
    return best


def told(difference: Difference) -> str:
    """A difference as a program to run and what it gives."""
    case, call, expected, found = difference
    keys = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
    lines = [f"--- {case.name}: {call}", case.code, *case.binds]
    for key in sorted(keys):
        lines += [f"  torch {key}: {str(expected.get(key))[:600]}", f"  fast  {key}: {str(found.get(key))[:600]}"]
    return "\n".join(lines)


@click.command()
@click.option("--minutes", type=float, default=60)
@click.option("--seed", type=int, default=None, help="Random if it is not named; printed.")
@click.option("--first", type=int, default=0, help="The first program's number.")
@click.option("--functions", type=int, default=84, help="For each build with torch's own headers.")
@click.option("--group", type=int, default=6, help="For each build the fast way.")
@click.option("--kind", type=click.Choice(list(grammar.KINDS)))
@click.option("--shrink/--no-shrink", default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()) / "opjit-fuzz", help="Keeps torch's builds.")
def main(minutes: float, seed: int | None, first: int, functions: int, group: int, kind: str | None, shrink: bool, folder: Path) -> None:
    """Compare for some minutes, in rounds of 84 functions."""
    os.environ.setdefault("OPJIT_CACHE", str(folder / "opjit"))
    seed = random.randrange(10**6) if seed is None else seed
    print(f"seed {seed}", flush=True)
    both.precompile(folder)
    until, total, reasons = time.monotonic() + 60 * minutes, Counter[str](), Counter[str]()
    while time.monotonic() < until:
        numbers = drawn(seed, first, functions * (len(grammar.KINDS) if kind else 1), kind)[:functions]
        first = numbers[-1] + 1
        compared = both.compare([grammar.draw(seed, number)[0] for number in numbers], folder, group)
        reasons.update(compared.left.values())
        total.update(_counts(compared, len(numbers)))
        for name, message in compared.wrong.items():
            print(f"torch's headers do not compile {name}: {message}")
        for difference in {one.case.name: one for one in reversed(compared.differences)}.values():
            print(told(shrunk(difference, seed, folder) if shrink else difference), flush=True)
        print(f"seed {seed}, programs to {first}: {dict(total)}", flush=True)
    for reason, count in reasons.most_common():
        print(f"left to torch's headers: {count} x {reason}")
    raise SystemExit(bool(total["differ"]))


def _counts(compared: Compared, drawn_now: int) -> dict[str, int]:
    return {"functions": drawn_now, "fast": len(compared.fast), "left": len(compared.left), "wrong": len(compared.wrong),
            "calls": sum(len(case.calls) for case in compared.fast), "differ": len({one.case.name for one in compared.differences})}


if __name__ == "__main__":
    main()

"""What it costs that a key has what the tools read.

    python tests/benchmarks/inputs.py [--against CHECKOUT]

    warm get            request.entry of a C op that is in the cache
    374 headers         opjit.build of a library whose source includes 374 headers, when it is in the cache
    the next C op       an inline op in a process that has built another one, and a cache that has opjit's runtime objects

Each is the CPU time of a fresh process and of its compilers, the smallest of some repetitions: other programs only add to it.
With --against, each round also asks the same of another checkout of opjit, such as an older commit's, and the table compares both.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import Row, alone, child, difference, show

HERE = Path(__file__).resolve().parents[2]
BARS = {"warm get": 2.1e-3, "374 headers": 10e-3}
NEXT = "the next C op"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout")
    arguments = parser.parse_args()
    places = [HERE, *([arguments.against.resolve()] if arguments.against else [])]
    script = Path(__file__).with_name("inputs_child.py")
    found: list[dict[str, list[float]]] = [{} for _ in places]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for number, place in enumerate(places):
                env = {"PYTHONPATH": str(place), "OPJIT_CACHE": f"{folder}/{number}"}
                for name, spent in child(script, folder, env=env).items():
                    found[number].setdefault(name, []).append(spent)
    ours = found[0]
    rows: list[Row] = [alone(name, ours[name], BARS.get(name)) for name in ours]
    for theirs in found[1:]:
        rows += [difference(name, ours[name], theirs[name]) for name in BARS]
        rows.append(difference(NEXT, ours[NEXT], theirs[NEXT], 10e-3))
    show("The price of inputs, in CPU time", rows, ("opjit", "other"))


if __name__ == "__main__":
    main()

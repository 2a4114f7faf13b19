"""Ask for programs before and after an edit, with a cache that saw them and with an empty one; see tests/stale/__init__.py."""

import argparse
import math
import random
import sys
from collections.abc import Iterable

from tests.stale import listed
from tests.stale.ask import KINDS, prepare
from tests.stale.campaign import Named, drawn, report, run
from tests.stale.compare import WRONG
from tests.stale.draw import draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stale", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="time for drawn programs")
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="else all")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--draw", type=int, help="one case by its number")
    parser.add_argument("--listed", action="store_true", help="the table of known cases")
    parser.add_argument("--every", type=int, default=1, help="only each Nth case of the table")
    parser.add_argument("--name", default="", help="only cases whose name has this text")
    parser.add_argument("--whole", action="store_true", help="print wrong cases as they are")
    options = parser.parse_args()
    kinds: list[str] = options.kind or [*KINDS]
    cases: Iterable[Named] = drawn(kinds, options.seed)
    seconds: float = options.seconds
    if options.listed:
        known = [case for case in listed.cases() if case.kind in kinds]
        cases = (("--listed", case) for case in known[:: options.every])
        seconds = math.inf
    elif options.draw is not None:
        cases = [("", draw(kind, options.seed, options.draw)) for kind in kinds]
    else:
        print(f"seed {options.seed}", flush=True)
    prepare(kinds)
    chosen = (named for named in cases if options.name in named[1].name)
    results = run(chosen, seconds, options.whole or options.listed)
    print(report(results))
    return any(each.verdict in WRONG for each in results)


if __name__ == "__main__":
    sys.exit(main())

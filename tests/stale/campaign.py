"""Runs many cases and says what came of them."""

import itertools
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.stale.ask import KINDS
from tests.stale.case import Case
from tests.stale.compare import WRONG, Compared, compare
from tests.stale.draw import draw
from tests.stale.minimize import minimized, script

Named = tuple[str, Case]  # the options that draw a case again, and the case


def drawn(kinds: Sequence[str], seed: int) -> Iterator[Named]:
    """Cases without end; the kinds take turns."""
    for number in itertools.count():
        for kind in kinds:
            yield f"--kind {kind} --seed {seed} --draw {number}", draw(kind, seed, number)


def run(cases: Iterable[Named], seconds: float, whole: bool) -> list[Compared]:
    """Run cases until the time is over, and print those that are wrong: the first of each name, made smaller unless `whole`."""
    end = time.monotonic() + seconds
    results: list[Compared] = []
    shown: set[tuple[str, str, str]] = set()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for options, case in cases:
            compared = compare(case, place)
            results.append(compared)
            sort = (case.kind, case.name, compared.verdict)
            if compared.verdict in WRONG and sort not in shown:
                shown.add(sort)
                small = compared if whole else minimized(compared, place)
                print(f"{script(small)}\n  {options}", flush=True)
            if time.monotonic() > end:
                break
    return results


def report(results: Sequence[Compared]) -> str:
    """How many cases of each kind gave each verdict, the names of those that are wrong, and why others cannot be built."""
    lines: list[str] = []
    for kind in KINDS:
        of_kind = [each for each in results if each.case.kind == kind]
        if of_kind:
            verdicts = Counter(each.verdict for each in of_kind)
            text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
            hits = sum(each.hit for each in of_kind)
            lines.append(
                f"{kind}: {len(of_kind)} cases: {text}; {hits} served again without an edit"
            )
    wrong = Counter(
        f"{each.verdict}: {each.case.name}" for each in results if each.verdict in WRONG
    )
    lines += [f"  {count} x {name}" for name, count in sorted(wrong.items())]
    unbuilt = Counter(_reason(each) for each in results if each.verdict == "no build")
    lines += [f"  {count} x {reason}" for reason, count in sorted(unbuilt.items())]
    return "\n".join(lines)


def _reason(compared: Compared) -> str:
    """Why a case cannot be built, without paths."""
    piece = compared.case.name.partition(":")[0]
    message = re.sub(r"\S*/(?=pro)", "", str(compared.first))
    return f"no build: {compared.case.kind}, {piece}: {message}"

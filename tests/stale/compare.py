"""Run a case: the answers with a cache that saw the program before the edit, against those with an empty one."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.stale.ask import Outcome, Step, ask, new_cache
from tests.stale.case import Case

# Verdicts that no case may have. The last one is of bytes alone: the values are equal.
WRONG = ("stale", "served", "refused", "crash", "bytes")


@dataclass(frozen=True)
class Compared:
    """What a case gave.

    Attributes:
        case: the case.
        verdict: "same"; "stale": another value; "served": a value where a clean build is an error; "refused": the reverse;
            "crash": an error that is not opjit's; "bytes": the same value of other bytes; "no build": nothing can be built at all;
            "uncached": the value has the time of each build.
        first, warm, clean: the answers before the edit, and after it with the same cache and with an empty one.
        at: which of the requests differs: "edited", "undone" or "redone".
        hit: whether a second request without an edit was served the file of the first.
    """

    case: Case
    verdict: str
    first: Outcome
    warm: Outcome
    clean: Outcome
    at: str = "edited"
    hit: bool = False


def verdict(warm: Outcome, clean: Outcome) -> str:
    """What it means that a cache gives the first answer and an empty cache the second."""
    if not (warm.ours and clean.ours):
        return "crash"
    if clean.error and warm.error:
        return "same" if clean.error == warm.error else "refused"
    if clean.error:
        return "served"
    if warm.error:
        return "refused"
    if warm.value != clean.value:
        return "stale"
    return "same" if warm.digest == clean.digest else "bytes"


def _answers(case: Case, root: Path, cache: Path) -> list[Outcome]:
    """The first answer, a second one without an edit, and those after the edit, after it is undone, and redone."""
    before = case.before
    after = case.after
    steps: list[Step] = [
        (before, None),
        (before, before),
        (after, before),
        (before, after),
        (after, before),
    ]
    if case.together and case.kind != "op":  # a process keeps the op that it has
        return ask(case.kind, steps, root, cache, case.quiet)
    return [ask(case.kind, [step], root, cache, case.quiet)[0] for step in steps]


def compare(case: Case, folder: Path) -> Compared:
    """Run a case in a new folder inside `folder`."""
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as made:
        place = Path(made)
        root = place / case.root
        root.mkdir()
        first, again, *later = _answers(case, root, new_cache(case.kind, place / "cache"))
        empty = new_cache(case.kind, place / "empty")
        [clean] = ask(case.kind, [(case.after, case.after)], root, empty)
    hit = first.value is not None and again.place == first.place
    if first.error and clean.error and first.ours and clean.ours:
        wrong = [each for each in later if not each.error]
        if wrong:
            return Compared(case, "served", first, wrong[0], clean)
        return Compared(case, "no build", first, later[0], clean)
    if case.clock and again.place != first.place:
        return Compared(case, "uncached", first, again, clean)
    pairs: Sequence[tuple[str, Outcome, Outcome]] = [
        ("again", again, first),
        *zip(("edited", "undone", "redone"), later, (clean, first, clean), strict=True),
    ]
    for at, warm, expected in pairs:
        found = verdict(warm, expected)
        if found != "same":
            return Compared(case, found, first, warm, expected, at, hit)
    return Compared(case, "same", first, later[0], clean, hit=hit)

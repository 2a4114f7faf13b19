"""The generator of edited programs: its cases can be drawn again, and it notices a cache that serves what is stale."""

import re

import pytest

from tests.helpers import fresh, module
from tests.stale import listed
from tests.stale.ask import KINDS, Outcome
from tests.stale.compare import WRONG, verdict
from tests.stale.draw import draw

# opjit.build's place is taken by a function that remembers its first answer in the cache, as a key without any input would.
FORGETFUL = """
import json, re, sys, tempfile
from pathlib import Path
from tests.stale import ask, compare, minimize
from tests.stale.case import Case, State, changed

def remembered(state, sources):
    kept = Path(ask.os.environ["OPJIT_CACHE"], "answer")
    kept.parent.mkdir(exist_ok=True)
    if "99" in Path(sources[0]).read_text():
        return ask.Outcome(99)
    if not kept.exists():
        kept.write_text(re.search("return ([0-9]+)", Path(sources[0]).read_text())[1])
    return ask.Outcome(int(kept.read_text()))

ask.KINDS["remembered"] = (remembered, ("a.c",))
ask.prepare(["remembered"])
before = State(files={"a.c": "int value(void) { return 1; }", "unused.h": ""}, cflags=("-O2",))
after = changed(before, files={"a.c": "int value(void) { return 2; }", "unused.h": ""})
with tempfile.TemporaryDirectory() as folder:
    place = Path(folder)
    found = compare.compare(Case("a source changes", "remembered", before, after), place)
    print(minimize.script(minimize.minimized(found, place)))
"""


def test_a_case_is_drawn_again_by_its_number() -> None:
    for kind in KINDS:
        cases = [draw(kind, 1, number) for number in range(40)]
        assert cases == [draw(kind, 1, number) for number in range(40)]
        assert all(case.before != case.after for case in cases)


def test_a_listed_case_has_an_edit_and_a_name_of_its_own() -> None:
    cases = [*listed.cases()]
    assert all(case.before != case.after for case in cases)
    assert len({(case.kind, case.name) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("warm", "clean", "expected"),
    [
        (Outcome(1), Outcome(1), "same"),
        (Outcome(1), Outcome(2), "stale"),
        (Outcome(1, digest="a"), Outcome(1, digest="b"), "bytes"),
        (Outcome(1), Outcome(error="BuildError"), "served"),
        (Outcome(error="BuildError"), Outcome(1), "refused"),
        (Outcome(error="BuildError"), Outcome(error="BuildError"), "same"),
        (Outcome(error="BuildError"), Outcome(error="ToolMissing"), "refused"),
        (Outcome(error="OSError", ours=False), Outcome(error="OSError", ours=False), "crash"),
    ],
)
def test_answers_that_differ_have_a_verdict(warm: Outcome, clean: Outcome, expected: str) -> None:
    assert verdict(warm, clean) == expected


@pytest.mark.slow
def test_a_cache_that_forgets_the_source_is_found_and_the_program_made_smaller() -> None:
    printed = fresh(FORGETFUL).stdout
    assert printed.startswith("stale: remembered, a source changes")
    assert "first 1; edited: 1, expected 2" in printed
    assert "unused.h" not in printed
    assert "-O2" not in printed


# The table takes minutes; the kinds share their mechanism, so that some cases of each do here.
EVERY = {"build": 2, "objects": 6, "load": 12, "load-objects": 12, "op": 4}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_known_case_is_stale(kind: str) -> None:
    done = module("tests.stale", "--listed", "--kind", kind, "--every", str(EVERY[kind]))
    verdicts = "|".join(WRONG)
    wrong = re.findall(rf"^(?:{verdicts}): {kind}, (.+) \(", done.stdout, re.MULTILINE)
    assert f"{kind}: " in done.stdout, done.stderr
    assert wrong == [], done.stdout

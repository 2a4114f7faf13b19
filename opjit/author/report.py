"""The results of `opjit test` for programs: JSON, JUnit's XML, and which checks failed in the last run."""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from xml.etree import ElementTree

from opjit import files
from opjit.store.store import default_store
from opjit.testing.checks import Line


def write_junit(results: Iterable[Line], path: Path) -> None:
    """Write results as JUnit's XML, which CI systems read: a suite for each op and device, a case for each check."""
    root = ElementTree.Element("testsuites")
    for subject, lines in groupby(results, attrgetter("subject")):
        suite = ElementTree.SubElement(root, "testsuite", name=subject)
        for line in lines:
            seconds = f"{line.seconds:.3f}"
            case = ElementTree.SubElement(
                suite, "testcase", classname=subject, name=line.name, time=seconds
            )
            if line.status != "ok":
                tag = "failure" if line.status == "failed" else "skipped"
                outcome = ElementTree.SubElement(case, tag, message=line.note)
                outcome.text = "\n".join(filter(None, [line.note, line.place, line.command]))
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    ElementTree.indent(root)
    path.write_bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")


def last_failed() -> dict[str, list[str]]:
    """Return the names of the checks that failed in the last run, by subject; empty if there was none."""
    found = files.read_checked(_note())
    return found if isinstance(found, dict) else {}


def keep_failed(results: Iterable[Line]) -> None:
    """Keep for `last_failed` which checks failed. Checks that did not run keep their state."""
    known = last_failed()
    for line in results:
        others = {*known.get(line.subject, [])} - {line.name}
        failed = [line.name] * (line.status == "failed")
        known[line.subject] = sorted([*others, *failed])
    files.write_checked(_note(), {subject: names for subject, names in known.items() if names})


def _note() -> Path | None:
    notes = default_store().notes
    return notes and notes / "last-failed.json"

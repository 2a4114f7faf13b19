"""The site's configuration names pages and names of the API that there are. `.ci/run` builds it, with warnings as errors."""

import re

import pytest

import opjit
from tests.helpers import ROOT

SITE = ROOT / ".github/site"


def test_every_page_of_the_repository_is_in_the_navigation() -> None:
    listed = set(
        re.findall(r": (\S+\.md)$", (SITE / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    there = {
        page.relative_to(ROOT).as_posix()
        for room in (".github", "examples", "kernels_c", "opjit", "tests/benchmarks")
        for page in (ROOT / room).rglob("*.md")
        if "site" not in page.parts and page.name != "pull_request_template.md"
    }
    assert listed == there | {"README.md", "api.md"}


def test_the_course_leads_from_page_to_page_in_the_order_of_the_navigation() -> None:
    text = (SITE / "mkdocs.yml").read_text(encoding="utf-8")
    section = text.partition("  - Course:\n")[2].partition("\n  - ")[0]
    steps = re.findall(r": (\S+\.md)$", section, re.MULTILINE)
    assert len(steps) == 6
    for number, step in enumerate(steps, 1):
        lines = (ROOT / step).read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith(f"# {number}. ")
        targets = [(ROOT / step).parent / link for link in re.findall(r"\]\(([^)]+)\)", lines[-1])]
        before = steps[number - 2 : number - 1] if number > 1 else []
        after = [*steps[number:], "examples/README.md"][0]
        assert [target.resolve() for target in targets] == [
            ROOT / each for each in [*before, after]
        ]


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    described = set(
        re.findall(
            r"^::: opjit\.(\w+)", (SITE / "pages/api.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert described - {"backends"} == set(opjit.__all__)


def test_no_build_of_the_site_hides_warnings_before_strict_counts_them() -> None:
    builds = [
        line
        for path in (".ci/run", ".github/workflows/site.yml")
        for line in (ROOT / path).read_text(encoding="utf-8").splitlines()
        if "mkdocs build" in line
    ]
    assert len(builds) == 2
    for line in builds:
        assert "--strict" in line
        assert not re.search(r"--quiet|-q\b", line)


def test_the_packages_of_the_site_have_versions_and_its_workflow_takes_them_from_there() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]["docs"]
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\d.]+", package) for package in packages), (
        packages
    )
    workflow = (ROOT / ".github/workflows/site.yml").read_text(encoding="utf-8")
    assert "['optional-dependencies']['docs']" in workflow
    assert "schedule:" in workflow  # with the newest
    assert not re.search(r"pip install .*mkdocs", workflow)

"""The site's configuration names pages and names of the API that there are. `.ci/run` builds it, with warnings as errors."""

from __future__ import annotations

import re

import opjit
from tests.helpers import ROOT

SITE = ROOT / ".github/site"


def test_every_page_of_the_repository_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (SITE / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    there = {page.relative_to(ROOT).as_posix() for room in (".github", "examples", "kernels_c", "opjit", "tests/benchmarks")
             for page in (ROOT / room).rglob("*.md") if "site" not in page.parts and page.name != "pull_request_template.md"}
    assert listed == there | {"README.md", "api.md"}


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    described = set(re.findall(r"^::: opjit\.(\w+)", (SITE / "pages/api.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert described - {"backends"} == set(opjit.__all__)

"""All pages stay true where a test is cheap: links, paths, commands, checks, and the layers of packages."""

import re
import shlex
from pathlib import Path

import pytest

from opjit import testing
from opjit.cli import main
from tests.helpers import ROOT

PAGES = [
    ROOT / "README.md",
    *(
        page
        for room in (".github", "examples", "kernels_c", "opjit", "tests/benchmarks")
        for page in sorted((ROOT / room).rglob("*.md"))
    ),
]
CONTRIBUTING = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(part, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", CONTRIBUTING, re.DOTALL)
    for line in block.splitlines()
    for part in line.split(" && ")
]


def floors() -> list[list[str]]:
    """The list of layers, from the top: the modules and packages of each, which stand before what they are for."""
    listed = re.search(r"^```text\n(__main__ .*?)^```", CONTRIBUTING, re.DOTALL | re.MULTILINE)
    assert listed is not None
    return [line.split("  ")[0].split(" · ") for line in listed[1].splitlines()]


def test_the_layers_list_every_module_and_package_once() -> None:
    shown = [name for floor in floors() for name in floor]
    there = {
        path.stem
        for path in (ROOT / "opjit").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert sorted(shown) == sorted(there)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, title = target.partition("#")
        place = page.parent / path if path else page
        assert place.exists(), target
        assert not title or title in _titles(place), target


def _titles(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_the_page_of_checks_has_every_check() -> None:
    page = (ROOT / "opjit/testing/CHECKS.md").read_text(encoding="utf-8")
    section = page.partition("## What each check needs")[2].partition("\n## ")[0]
    items = re.findall(r"^- (`[^:]+`): ", section, re.MULTILINE)
    named = set(re.findall(r"`([^`]+)`", " ".join(items)))
    checks = {check.name for check in (*testing.CHECKS, *testing.OPTIONAL)}
    assert named == checks | {"races", "address+undefined"}


def test_every_path_that_contributing_names_is_there() -> None:
    quoted = re.findall(r"`([\w./<>-]+/[\w./<>-]*)`", CONTRIBUTING)
    for path in [path for path in quoted if "<" not in path and not path.endswith("test_clip.py")]:
        assert (ROOT / path).exists(), path


def test_the_builder_s_description_names_functions_that_there_are() -> None:
    text = (ROOT / "opjit/builder/__init__.py").read_text(encoding="utf-8")
    steps = re.findall(r"^ *\d+\. ([\w/]+\.py), (\w+): ", text, re.MULTILINE)
    assert len(steps) > 15
    for file, function in steps:
        assert f"def {function}(" in (ROOT / "opjit" / file).read_text(encoding="utf-8"), function


@pytest.mark.parametrize(
    ("message", "is_good"),
    [
        ("store: compare absences before a hit", True),
        ("docs: rewrite the README\n\nThe reason, with a full stop.\n", True),
        ("fixup! store: compare absences", True),
        ("Compare absences before a hit", False),
        ("store: Compare absences", False),
        ("store: compare absences.", False),
        (f"store: {'x' * 66}", False),
        (f"store: {'x' * 65}", True),
    ],
)
def test_the_hook_of_commit_messages_wants_area_and_imperative(message: str, is_good: bool) -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entry = re.search(r"id: commit-subject.*?entry: '(.*?)'\n", text, re.DOTALL)
    assert entry is not None
    assert bool(re.search(entry[1], message, re.MULTILINE | re.DOTALL)) is is_good


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_names_programs_subcommands_and_files_that_there_are(
    command: list[str],
) -> None:
    program, *arguments = command
    assert program == "python3" or program.startswith(".venv/bin/") or (ROOT / program).is_file()
    if program == ".venv/bin/opjit":
        subcommand = main.commands[arguments[0]]
        options = {option for parameter in subcommand.params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= options
    for argument in arguments:
        if "/" in argument and not argument.startswith(".venv"):
            assert (ROOT / argument).exists()


def test_the_files_of_checks_are_those_that_contributing_names() -> None:
    named = re.search(r"under `@add\(CHECKS, \"name\"\)`: (.*?)\. Its", CONTRIBUTING, re.DOTALL)
    assert named is not None
    modules = {check.run.__module__ for check in testing.CHECKS}
    assert {f"opjit.testing.{name}" for name in re.findall(r"`(\w+)`", named[1])} == modules

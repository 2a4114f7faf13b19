"""The variables that opjit reads: each is known and documented, and switches are read in one way."""

import ast
import re

import pytest

from opjit import environment
from tests import helpers, reference


def test_every_variable_that_the_code_names_is_known() -> None:
    read = set()
    for path in (helpers.ROOT / "opjit").rglob("*.py"):
        if path.name != "environment.py":
            read |= {
                node.value
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"OPJIT_[A-Z_]+[A-Z]", node.value)
            }
    assert read == environment.VARIABLES.keys()
    assert environment.VARIABLES.keys() >= environment.SWITCHES


def test_the_page_of_commands_and_variables_is_current() -> None:
    """After a change: python -m tests.reference."""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page()


@pytest.mark.parametrize(
    ("value", "on"),
    [(None, False), ("", False), ("0", False), ("1", True), ("yes", True), ("false", True)],
)
def test_a_switch_is_off_only_without_a_value_and_at_0(
    monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool
) -> None:
    monkeypatch.delenv("OPJIT_OFFLINE", raising=False)
    if value is not None:
        monkeypatch.setenv("OPJIT_OFFLINE", value)
    assert environment.is_on("OPJIT_OFFLINE") is on

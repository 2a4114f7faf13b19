"""The table of `opjit test`: in colour, and a long note stays in its column."""

from __future__ import annotations

import sys

import click
import pytest

from opjit.testing.checks import Line
from opjit.testing.command import Options, _Table

NOTE = "expected 1.5, got 2.5 at index (3, 4) of a result that holds many elements\n    x = 1;\n    ^~~~~"


def test_on_a_terminal_a_line_is_coloured_and_a_long_note_hangs_in_its_column(monkeypatch: pytest.MonkeyPatch,
                                                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _Table(Options()).add(Line("custom", "failed", NOTE), "op", "cpu")
    shown = capsys.readouterr().out
    assert click.style("failed  ", "red") in shown
    assert click.unstyle(shown).splitlines() == ["  failed   custom             expected 1.5, got 2.5 at index (3, 4) of a result",
                                                 " " * 30 + "that holds many elements", " " * 34 + "x = 1;", " " * 34 + "^~~~~"]


def test_in_a_file_a_line_is_plain_and_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _Table(Options()).add(Line("custom", "failed", NOTE), "op", "cpu")
    assert capsys.readouterr().out.splitlines()[0] == f"  failed   custom             {NOTE.splitlines()[0]}"
    _Table(Options()).add(Line("custom", "ok", ""), "op", "cpu")
    assert capsys.readouterr().out == "  ok       custom\n"

"""Every command that takes an op's folder asks who can write it, before anything in it is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from opjit.cli import main
from tests.helpers import LEVELS, write_op

# The words after the folder, for each command with an OP or FOLDER.
OF_FOLDERS = {"get": ("--device", "cpu"), "why": ("--device", "cpu"), "test": ("--only", "results"), "bench": (), "precompile": (),
              "wheel": ("--arch", LEVELS[0])}
OF_NAMES = {"cache clear": (), "cache push": ("--unsigned",), "cache pull": (), "cache pack": ()}  # the same word is a name there


def with_ops(group: click.Group = main, path: str = "") -> Iterator[str]:
    for name, each in group.commands.items():
        if isinstance(each, click.Group):
            yield from with_ops(each, f"{path}{name} ")
        elif any(isinstance(one, click.Argument) and re.search(r"\b(OP|FOLDER)\b", one.make_metavar(click.Context(each)))
                 for one in each.params):
            yield f"{path}{name}"


@pytest.mark.parametrize("command", sorted(with_ops()))
def test_a_folder_that_others_can_write_is_not_run_by(command: str, tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = tmp_path / "open" / "plus", tmp_path / "ran"
    write_op(folder, op_py=f"import pathlib\npathlib.Path({str(marker)!r}).write_text('')\n").parent.chmod(0o777)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("OPJIT_REMOTE", f"file://{tmp_path}/remote")
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    before = ["ops.tar"] if command == "cache pack" else []
    done = CliRunner().invoke(main, [*command.split(), *before, "./plus", *{**OF_FOLDERS, **OF_NAMES}[command]])
    assert not marker.exists()
    if command in OF_FOLDERS:
        assert done.exit_code == 1
        assert f"{folder.parent} can be written by others" in done.output


def test_a_wheel_s_folder_may_be_named_without_a_slash_and_is_asked_for_all_the_same(tmp_path: Path,
                                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_op(tmp_path / "plus", op_py="raise AssertionError('it was run')\n")
    folder.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    assert f"{folder} can be written by others" in CliRunner().invoke(main, ["wheel", "plus", "--arch", LEVELS[0]]).output

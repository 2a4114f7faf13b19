"""The command line explains itself: first steps, examples that parse, groups, versions, completion."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import opjit
from opjit.cli import main
from opjit.cli.help import EXAMPLES, FIRST_STEPS, SECTIONS, Command
from tests.helpers import ROOT, fresh


def all_commands(group: click.Group = main, path: str = "") -> Iterator[str]:
    for name, each in group.commands.items():
        if isinstance(each, click.Group):
            yield from all_commands(each, f"{path}{name} ")
        else:
            yield f"{path}{name}"


def test_each_command_has_examples_a_heading_and_a_short_summary() -> None:
    assert sorted(EXAMPLES) == sorted(all_commands())
    cache = main.commands["cache"]
    assert isinstance(cache, click.Group)
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted([*main.commands, *cache.commands])
    for arguments in (["--help"], ["cache", "--help"]):
        listed = CliRunner().invoke(main, arguments, prog_name="opjit", terminal_width=80).output.partition("Options:")[2]
        assert "..." not in listed
        assert all(re.match(r"  \w+ +[A-Z]", line) for line in listed.partition("exit.")[2].splitlines() if line.startswith("  "))


def test_more_than_three_options_stand_under_headings() -> None:
    for path in all_commands():
        found: click.Command = main
        for word in path.split():
            assert isinstance(found, click.Group)
            found = found.commands[word]
        options = [each for each in found.params if isinstance(each, click.Option)]
        assert isinstance(found, Command)
        titles = found.option_groups(click.Context(found, info_name=path))
        assert ("Options" in titles) == (len(options) <= 3), path
        assert len(options) <= 3 or [flag.endswith("--help") for flag, _ in titles["Help"]] == [True], path


def test_help_shows_all_headings_with_one_column_of_meanings() -> None:
    printed = CliRunner().invoke(main, ["get", "--help"], prog_name="opjit", terminal_width=80).output
    assert re.findall(r"^(\w+):$", printed, re.MULTILINE) == ["Target", "Binary", "Report", "Help", "Examples"]
    starts = {line.index(meaning) for line in printed.splitlines() for meaning in ("Device to", "Build it for", "Also compile", "Show this")
              if meaning in line}
    assert len(starts) == 1
    assert CliRunner().invoke(main, ["list", "--help"], prog_name="opjit").output.count("\nOptions:\n") == 1


@pytest.mark.parametrize("line", [*(line for lines in EXAMPLES.values() for line in lines),
                                  *re.findall(r"^  (opjit .*?)  ", FIRST_STEPS, re.MULTILINE)])
def test_an_example_is_a_command_that_click_takes(line: str) -> None:
    words = shlex.split(line)[1:]
    group: click.Command = main
    while isinstance(group, click.Group):
        group = group.commands[words.pop(0)]
    group.make_context("opjit", words)


@pytest.mark.parametrize("path", [*all_commands(), "", "cache"])
def test_help_shows_the_examples_in_80_columns(path: str) -> None:
    done = CliRunner().invoke(main, [*path.split(), "--help"], prog_name="opjit", terminal_width=80, color=True)
    assert done.exit_code == 0
    plain = click.unstyle(done.output)
    assert all(f"  {line}\n" in plain for line in EXAMPLES.get(path, ()))
    assert all(len(line) <= 80 for line in plain.splitlines() if line.strip() not in EXAMPLES.get(path, ()))
    assert plain != done.output


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_help_is_plain_where_colour_is_not_wanted(variables: dict[str, str]) -> None:
    assert "\x1b" not in CliRunner(env=variables).invoke(main, ["get", "--help"], color=True).output


def test_the_command_alone_says_what_to_do_first() -> None:
    done = CliRunner().invoke(main, [], prog_name="opjit")
    assert (done.exit_code, done.output) == (0, FIRST_STEPS)


def test_the_version_tells_all_that_a_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_CACHE", "/some/cache")
    lines = dict(line.split(maxsplit=1) for line in CliRunner().invoke(main, ["--version"]).output.splitlines())
    assert list(lines) == ["opjit", "python", "torch", "cc", "nvcc", "nvrtc", "cache"]
    assert lines["opjit"] == opjit.__version__
    assert "version" in lines["cc"]
    assert lines["cache"] == "/some/cache"


def test_the_version_is_told_where_only_a_checkout_is_and_no_compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.setenv("CC", "/nowhere/cc")
    done = CliRunner().invoke(main, ["--version"], prog_name="opjit")
    assert done.exit_code == 0
    assert done.output.startswith(f"opjit   {opjit.__version__}\n")
    assert "cc      none; opjit doctor says more\n" in done.output


def completed(*words: str) -> list[str]:
    shell = ShellComplete(main, {}, "opjit", "_OPJIT_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_a_shell_completes_ops_archs_and_devices() -> None:
    assert completed("ge") == ["get"]
    assert completed("get", "allr") == ["allreduce"]
    assert completed("test", "add_custom", "lltm_f") == ["lltm_forward"]
    assert completed("get", "allreduce", "--arch", "sm_9") == ["sm_90"]
    assert completed("precompile", "--all", "--arch", "x86-64-v3,sm_9") == ["x86-64-v3,sm_90"]
    assert completed("bench", "--device", "cu") == ["cuda"]


@pytest.mark.parametrize("line", ["", "--help", "--version", "--include", "get --help", "cache --help", "cache path"])
def test_what_needs_no_op_does_not_wait_for_torch(line: str) -> None:
    assert imported("-m", "opjit", *line.split()) == ["opjit.cli.help"]
    if line == "cache path":
        assert imported(os.path.join(sysconfig.get_path("scripts"), "opjit"), *line.split()) == ["opjit.cli.help"]


def test_completion_of_a_word_that_is_no_op_does_not_wait_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_OPJIT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "opjit pre")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert imported("-m", "opjit") == ["opjit.cli.help"]


def imported(*words: str) -> list[str]:
    """Those of torch and of opjit's command line that a new Python imports."""
    done = subprocess.run([sys.executable, "-X", "importtime", *words], capture_output=True, text=True, check=True)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return [name for name in ("torch", "opjit.cli.help") if name in names]


def test_a_program_called_opjit_has_the_bundled_ops(tmp_path: Path) -> None:
    (script := tmp_path / "opjit").write_text("import torch, opjit\nprint(torch.ops.opjit.allreduce)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == "opjit.allreduce\n", done.stderr


def test_a_program_has_the_bundled_ops_in_whichever_order_it_imports() -> None:
    for first, second in (("torch", "opjit"), ("opjit", "torch")):
        fresh(f"import {first}, {second}; torch.ops.opjit.allreduce, opjit.get, opjit.errors.OpjitError", cold=True)


def test_every_public_name_is_there_in_the_command_too() -> None:
    code = (
        "import sys\nsys.argv, sys.orig_argv = ['-m'], ['python', '-m', 'opjit']\nimport opjit\nassert 'torch' not in sys.modules\n"
        "opjit.get, opjit.Op, opjit.op, opjit.cache.path, opjit.errors.OpjitError\n"
        "assert [name for name in opjit.__all__ if not hasattr(opjit, name)] == [] and dir(opjit) == sorted(opjit.__all__)\n"
        "from opjit import *\n")
    assert imported("-c", code) == ["torch"]


@pytest.mark.parametrize("line", ["keygen ci made", "new mylib::made --cuda", "new --project made", "new --backend made"])
def test_what_only_writes_files_does_not_wait_for_torch(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if line.startswith("keygen"):
        pytest.importorskip("cryptography")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert imported("-m", "opjit", *line.split()) == ["opjit.cli.help"]
    assert (tmp_path / "made").is_dir()

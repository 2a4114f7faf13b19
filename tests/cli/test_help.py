"""The command line explains itself: first steps, examples that parse, groups, versions, completion."""

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import sysconfig
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import opjit
from opjit import progress
from opjit.cli import main
from opjit.cli.help import FIRST_STEPS, Group
from tests.helpers import ROOT, command, environment


def all_commands(group: click.Group = main, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, each in group.commands.items():
        if isinstance(each, click.Group):
            yield from all_commands(each, f"{path}{name} ")
        else:
            yield f"{path}{name}", each


COMMANDS = dict(all_commands())
EXAMPLES = {
    path: re.findall(r"^  (opjit .*)$", command.epilog or "", re.MULTILINE)
    for path, command in COMMANDS.items()
}


def test_each_command_has_examples_a_heading_and_a_short_summary() -> None:
    assert [path for path, lines in EXAMPLES.items() if not lines] == []
    cache = main.commands["cache"]
    for group in (main, cache):
        assert isinstance(group, Group)
        listed = [name for names in group.sections.values() for name in names]
        assert sorted(listed) == sorted(group.commands)
    for arguments in (["--help"], ["cache", "--help"]):
        shown = (
            CliRunner()
            .invoke(main, arguments, prog_name="opjit", terminal_width=80)
            .output.partition("Options:")[2]
        )
        assert "..." not in shown
        assert all(
            re.match(r"  \w+ +[A-Z]", line)
            for line in shown.partition("exit.")[2].splitlines()
            if line.startswith("  ")
        )


@pytest.mark.parametrize(
    "line",
    [
        *(line for lines in EXAMPLES.values() for line in lines),
        *re.findall(r"^  (opjit .*?)  ", FIRST_STEPS, re.MULTILINE),
    ],
)
def test_an_example_is_a_command_that_click_takes(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    for candidate in words if {"judge", "port"} & {*words} else ():
        Path(candidate).touch()
    group: click.Command = main
    while isinstance(group, click.Group):
        group = group.commands[words.pop(0)]
    group.make_context("opjit", words)


@pytest.mark.parametrize("path", [*COMMANDS, "", "cache"])
def test_help_shows_the_examples_in_80_columns(path: str) -> None:
    done = CliRunner().invoke(main, [*path.split(), "--help"], prog_name="opjit", terminal_width=80)
    assert done.exit_code == 0
    assert all(f"    {line}\n" in done.output for line in EXAMPLES.get(path, ()))
    assert all(
        len(line) <= 80
        for line in done.output.splitlines()
        if line.strip() not in EXAMPLES.get(path, ())
    )


@pytest.mark.parametrize("path", COMMANDS)
def test_each_command_has_the_common_options(path: str) -> None:
    options = {option for each in COMMANDS[path].params for option in each.opts}
    assert {"-q", "--quiet", "-v", "--verbose"} <= options
    assert ("--json" in options) == ("--output" in options) or path in ("record", "wheel")


def test_output_is_for_json_and_must_be_writable(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["list", "--output", str(tmp_path / "ops.json")])
    assert refused.exit_code == 2
    assert "--output needs --json" in refused.output
    lost = CliRunner().invoke(main, ["list", "--json", "--output", str(tmp_path / "no" / "a.json")])
    assert lost.exit_code == 2
    assert re.search(r"a\.json'?: No such file", lost.output), lost.output

    file = tmp_path / "ops.json"
    done = CliRunner().invoke(main, ["list", "--json", "--output", str(file)])
    assert done.output == ""
    assert "opjit::allreduce" in [op["op"] for op in json.loads(file.read_text())]


def test_verbose_reports_steps_and_quiet_leaves_out_remarks(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    verbose = command("get", "tensor_negate", "--device", "cpu", "-v", OPJIT_CACHE=cache)
    assert "opjit: " in verbose.stderr
    recorded = ["-o", str(tmp_path / "ops.json"), "--", "true"]
    assert "wrote" in command("record", *recorded).stderr
    assert command("record", "-q", *recorded).stderr == ""


def test_lists_fit_a_terminal_and_have_a_line_for_each_op_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piped = command("list").stdout.splitlines()
    assert all(re.match(r"\w+::\w+  \[.*\]  \w+\(.*\) -> .*$", line) for line in piped), piped
    assert max(map(len, piped)) > 80
    assert "eps=1e-06" in "".join(piped)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    shown = b""
    with subprocess.Popen(
        [sys.executable, "-m", "opjit", "list"], stdout=follower, env=environment()
    ) as running:
        os.close(follower)
        with suppress(OSError):  # the end, as Linux tells it
            while part := os.read(leader, 1 << 16):
                shown += part
        assert running.wait() == 0
    os.close(leader)
    listed = shown.decode().splitlines()
    assert max(map(len, listed)) <= 80
    assert any(line.startswith("opjit::lltm_backward  [cpu, cuda]") for line in listed)


def test_text_for_people_shortens_paths_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    key = "0123456789ab" + "c" * 52
    text = progress.readable(f"  in /home/ann/cache/{key}: it is there\n{'word ' * 20}")
    assert text.splitlines()[0] == "  in ~/cache/0123456789ab…: it is there"
    assert max(map(len, text.splitlines())) <= 80


def test_the_command_alone_says_what_to_do_first() -> None:
    done = CliRunner().invoke(main, [], prog_name="opjit")
    assert (done.exit_code, done.output) == (0, FIRST_STEPS)


def test_the_version_and_the_folder_of_the_header_are_told() -> None:
    assert command("--version").stdout == f"opjit {opjit.__version__}\n"
    printed = command("--include").stdout.strip()
    assert printed == opjit.include_path()
    assert Path(printed, "opjit.h").is_file()


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
    assert completed("test", "allreduce", "--only", "gradc") == ["gradcheck"]


@pytest.mark.parametrize(
    "line", ["", "--help", "--version", "--include", "get --help", "cache --help", "cache path"]
)
def test_what_needs_no_op_does_not_wait_for_torch(line: str) -> None:
    assert imported("-m", "opjit", *line.split()) == ["opjit.cli.help"]
    if line == "cache path":
        assert imported(os.path.join(sysconfig.get_path("scripts"), "opjit"), *line.split()) == [
            "opjit.cli.help"
        ]


def imported(*words: str) -> list[str]:
    """Those of torch and of opjit's command line that a new Python imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], capture_output=True, text=True, check=True
    )
    names = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    return [name for name in ("torch", "opjit.cli.help") if name in names]


def test_a_program_called_opjit_has_the_bundled_ops(tmp_path: Path) -> None:
    (script := tmp_path / "opjit").write_text(
        "import torch, opjit\nprint(torch.ops.opjit.allreduce)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "opjit.allreduce\n", done.stderr


def test_every_public_name_is_there_in_the_command_too() -> None:
    code = (
        "import sys\nsys.argv, sys.orig_argv = ['-m'], ['python', '-m', 'opjit']\nimport opjit\nassert 'torch' not in sys.modules\n"
        "opjit.get, opjit.Op, opjit.op, opjit.cache.path, opjit.errors.OpjitError\n"
        "assert [name for name in opjit.__all__ if not hasattr(opjit, name)] == [] and dir(opjit) == sorted(opjit.__all__)\n"
        "from opjit import *\n"
    )
    assert imported("-c", code) == ["torch"]


@pytest.mark.parametrize(
    "line", ["keygen ci made", "new mylib::made --cuda", "new --project made", "new --backend made"]
)
def test_what_only_writes_files_does_not_wait_for_torch(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line.startswith("keygen"):
        pytest.importorskip("cryptography")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert imported("-m", "opjit", *line.split()) == ["opjit.cli.help"]
    assert (tmp_path / "made").is_dir()


def test_help_is_a_command_too() -> None:
    run = CliRunner().invoke
    whole = run(main, ["--help"])
    assert run(main, ["help"]).output == whole.output
    for words in (["get"], ["cache", "push"], ["run"]):
        asked = run(main, ["help", *words]).output
        assert asked == run(main, [*words, "--help"]).output
    assert command("run", "-h").stdout.startswith("Usage: opjit run ")
    assert run(main, ["help", "nokernel"]).output == run(main, ["help", "NoKernel"]).output
    missing = run(main, ["help", "gett"])
    assert missing.exit_code == 2
    assert "expected a command or a class of errors such as NoKernel, got 'gett'" in missing.output


def test_an_error_is_explained_as_text_and_not_as_markdown() -> None:
    shown = CliRunner().invoke(main, ["help", "UnknownOp"]).output
    assert "```" not in shown
    assert "###" not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("words", [["cache", "-q", "path"], ["-q", "cache", "path"]])
def test_groups_have_the_common_options_too(words: list[str]) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output


def test_an_option_of_the_main_command_is_told_where_it_belongs() -> None:
    done = CliRunner().invoke(main, ["list", "--color", "never"])
    assert done.exit_code == 2
    assert "--color goes before the command: opjit --color ... COMMAND" in done.output
    assert "Did you mean" not in done.output


@pytest.mark.parametrize("command", ["test", "get", "bench", "tune"])
def test_a_directory_that_is_missing_is_told_before_torch_is_imported(
    command: str, tmp_path: Path
) -> None:
    words = [*command.split(), str(tmp_path / "nosuch")]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "opjit", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 2
    assert f"Error: there is no directory {tmp_path}/nosuch" in done.stderr
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_colors_follow_no_color_and_the_option() -> None:
    """Text for a terminal; a pipe gets none anyway."""
    import click

    @main.command(name="colors-of-a-test", cls=click.Command)
    def colors() -> None:
        click.secho("green", fg="green")

    try:
        for words, variables, colored in (
            (["--color", "always"], {}, True),
            (["--color", "always"], {"NO_COLOR": "1"}, True),
            (["--color", "never"], {}, False),
            ([], {"NO_COLOR": "1"}, False),
            ([], {}, True),
        ):
            done = CliRunner().invoke(
                main, [*words, "colors-of-a-test"], env=variables, color=colored or not words
            )
            assert ("\x1b[" in done.output) == colored, (words, variables)
    finally:
        del main.commands["colors-of-a-test"]

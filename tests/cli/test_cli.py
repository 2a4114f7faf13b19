"""The command in a terminal and a script: its warnings, errors, and signals."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from opjit.backends.targets import host_of
from opjit.cli import main
from tests import helpers
from tests.helpers import OnCompile, is_alive, until


def test_opjit_get_that_is_sent_sigterm_ends_its_compilers_and_leaves_nothing_half_done(
    op: Path, here: Path, on_compile: OnCompile
) -> None:
    pids = here.with_name("pids")
    on_compile(f"echo $$ > '{pids}'; sleep 100")
    with helpers.process(f"from opjit.cli import main; main(['get', {str(op)!r}])") as running:
        until(lambda: pids.exists() and pids.read_text() != "", process=running)
        time.sleep(0.5)  # the file may be there before Python waits for the compiler
        os.kill(running.pid, signal.SIGTERM)
        told = "interrupted by SIGTERM; finished builds are kept, and the same command continues from there\n"
        assert running.communicate() == ("", told)
        assert running.returncode == 128 + signal.SIGTERM
        assert not is_alive(int(pids.read_text()))
        assert list((here / "v2" / "staging").iterdir()) == []


def test_opjit_get_under_nohup_goes_on_at_a_sighup(
    op: Path, here: Path, on_compile: OnCompile
) -> None:
    reached = here.with_name("reached")
    on_compile(f"touch '{reached}'; sleep 1")
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with helpers.process(
        f"{ignoring}; from opjit.cli import main; main(['get', {str(op)!r}])"
    ) as running:
        until(reached.exists, process=running)
        os.kill(running.pid, signal.SIGHUP)
        assert running.communicate()[0].endswith(".so\n")


def test_a_binary_that_goes_when_the_command_ends_is_built_once_and_is_a_failure(
    op: Path, tmp_path: Path, log: Path
) -> None:
    for words in (("--device", "cpu"), ("--arch", helpers.LEVELS[0])):
        log.write_text("")
        done = helpers.command("get", op, *words, OPJIT_CACHE="/proc/x")
        assert (done.returncode, done.stdout, len(log.read_text().splitlines())) == (1, "", 1)
        message = helpers.without_pointer(done.stderr).splitlines()[-1]
        assert message.startswith("Error: keytest::plus for cpu ")
        assert "cannot be cached" in message
    done = helpers.command(
        "get", op, "--device", "cpu", "--build-directory", tmp_path / "built", OPJIT_CACHE="/proc/x"
    )
    assert (done.returncode, Path(done.stdout.strip()).is_file()) == (0, True)


@pytest.mark.slow
def test_a_warning_of_opjit_is_shown_as_its_text_at_the_command_line_and_others_as_python_shows_them(
    op: Path, tmp_path: Path
) -> None:
    (op / "op.py").write_text("import warnings\nwarnings.warn('its own')\n" + helpers.OP_PY)

    def get(filters: str) -> subprocess.CompletedProcess[str]:
        cache = str(tmp_path / f"cache-{filters}")
        return helpers.command(
            "get",
            op,
            "--device",
            "cpu",
            OPJIT_REMOTE="nowhere",
            OPJIT_CACHE=cache,
            PYTHONWARNINGS=filters,
        )

    done = get("default")
    ours = done.stderr.splitlines()[-1]
    others = done.stderr.splitlines()[:-1]
    assert ours.startswith(
        "Warning: the remote nowhere failed and is not used again: expected a URL such as https://"
    )
    assert others == [f"{op / 'op.py'}:2: UserWarning: its own", "  warnings.warn('its own')"]
    assert get("ignore").stderr == ""
    done = get("error:the remote")
    assert (done.returncode, "CacheWarning: the remote nowhere" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("text", "commands", "expected"),
    [
        (
            "import helper\n",
            ["get", "list"],
            [
                "raised ModuleNotFoundError: No module named 'nowhere'",
                'op.py", line 1',
                "    import helper",
                'helper.py", line 2',
                "    import nowhere",
            ],
        ),
        (
            "def (\n",
            ["test", "bench"],
            ["raised SyntaxError: ", 'op.py", line 1', "    def (", "^"],
        ),
    ],
)
def test_an_op_py_that_raises_is_told_of_without_opjit_s_lines(
    op: Path, tmp_path: Path, text: str, commands: list[str], expected: list[str]
) -> None:
    (tmp_path / "helper.py").write_text("\nimport nowhere\n")
    (op / "op.py").write_text(text)
    path = os.pathsep.join([str(helpers.ROOT), str(tmp_path)])
    for name in commands:
        done = helpers.command(
            name, *([] if name == "list" else [op]), PYTHONPATH=path, OPJIT_PATH=str(op)
        )
        assert (done.returncode, done.stdout) == (1, "")
        shown = done.stderr[
            done.stderr.index("Error: ") :
        ].splitlines()  # a CUDA build of torch may remark on the GPU before
        assert shown[0].startswith(f"Error: {op / 'op.py'} ")
        assert all(part in line for part, line in zip(expected, shown, strict=True)), done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["get", "nosuch"], "no op named 'opjit::nosuch' is declared"),
        (["get", "allreduce", "--device", "toaster"], "toaster"),
        (["get", "allreduce", "--arch", "toaster"], "toaster"),
        (["get", "allreduce", "--nosuch"], "No such option"),
        (["test", "allreduce", "--only", "nosuch"], "there is no check 'nosuch'"),
        (["test", "allreduce", "--only", "races"], "the check 'races' needs --emulate"),
        (["test", "allreduce", "--sanitize", "nosuch"], "there is no sanitizer 'nosuch'"),
        (["bench", "allreduce", "--device", "cpu", "--only", "nosuch"], "nothing was measured"),
        (["new", "scale"], "expected namespace::name"),
        (["cache", "pull"], "expected the URL of a remote"),
        (
            ["get", "allreduce", "--arch", "sm_999"],
            "no installed CUDA compiler supports sm_999; use sm_",
        ),
        (["why", "/nowhere/op"], "there is no directory /nowhere/op"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_ends_with_2(here: Path, words: list[str], told: str) -> None:
    done = CliRunner().invoke(main, words)
    assert told in done.output, done.output
    assert done.exit_code == 2


def test_work_that_fails_ends_with_1(op: Path) -> None:
    (op / "plus.c").write_text("this is no C\n")
    done = helpers.command("get", op, "--device", "cpu")
    assert "error: " in done.stderr
    assert done.returncode == 1


def test_why_explains_the_op_of_an_absolute_directory(op: Path) -> None:
    done = helpers.command("why", op, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "keytest::plus" in done.stdout


def test_get_writes_commands_that_compile(op: Path, here: Path, tmp_path: Path) -> None:
    place = tmp_path / "compile_commands.json"
    done = helpers.command("get", op, "--device", "cpu", "--compile-commands", place)
    assert done.returncode == 0, done.stderr
    [command] = json.loads(place.read_text())
    assert command["file"] == str(op / "plus.c")
    words = [*command["arguments"], "-o", str(tmp_path / "plus.o")]
    subprocess.run(words, cwd=command["directory"], check=True)
    assert (tmp_path / "plus.o").is_file()


def test_get_takes_several_archs(op: Path, here: Path, tmp_path: Path) -> None:
    archs = [arch for arch in helpers.cpu().archs() if host_of(arch) == platform.machine()][:2]
    done = CliRunner().invoke(
        main, ["get", str(op), "--arch", ",".join(archs)], catch_exceptions=False
    )
    folders = [path.split("/")[-3] for path in done.stdout.split()]
    assert [folder.rpartition("-")[0] for folder in folders] == archs
    named = CliRunner().invoke(
        main,
        [
            "get",
            str(op),
            "--arch",
            ",".join(archs),
            "--build-directory",
            str(tmp_path),
            "--name",
            "one",
        ],
    )
    assert named.output.split() == [f"{tmp_path}/one/keytest.plus.so", f"{tmp_path}/one.so"]


def test_get_precompile_and_verify_print_one_json_document(op: Path, here: Path) -> None:
    def document(*words: str) -> Any:
        done = helpers.command(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    [binary] = document("get", str(op), "--device", "cpu")
    assert (binary["op"], binary["backend"]) == ("keytest::plus", "cpu")
    assert Path(binary["path"]).is_file()
    report = document("precompile", str(op), "--arch", binary["arch"])
    assert (report["built"], len(report["there"]), report["failed"]) == ([], 1, {})
    verdicts = {each["op"]: each["verdict"] for each in document("cache", "verify")}
    assert verdicts["keytest::plus"] == "good"
    package, library = document(
        "get", str(op), "--device", "cpu", "--build-directory", str(here / "build"), "--name", "lib"
    )
    assert Path(package["path"]).is_file()
    assert library["path"] == str(here / "build" / "lib.so")


def test_opjit_in_an_archive_says_that_it_must_be_unpacked(tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "opjit"), "zip", helpers.ROOT, "opjit")
    code = f"import sys; sys.path.insert(0, {archive!r}); import opjit"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"ImportError: opjit cannot run from the archive {archive}" in done.stderr

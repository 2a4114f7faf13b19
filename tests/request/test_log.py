"""Each request's way: in the log ``opjit``, and on stderr with OPJIT_VERBOSE=1; and the variables of the environment."""

import logging
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

import opjit
from opjit.backends import targets
from opjit.errors import CompileError
from opjit.request import entry
from tests import helpers
from tests.helpers import PLUS, declare, fresh, write_op

USE = "print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())"


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> opjit.Op:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    known = helpers.declared("logtest", tmp_path / "plus", monkeypatch)
    with open(known.folder / "plus.c", "a", encoding="utf-8") as source:
        # A key of its own: else a build of the same op in another test's process is waited for.
        source.write(f"/* {tmp_path} */\n")
    return known


def request(op: opjit.Op) -> str:
    return str(entry(op, targets.here(helpers.cpu())).folder)


def test_a_cold_request_logs_why_it_builds_how_long_it_took_and_where_it_went_and_a_warm_one_where_it_is(
    op: opjit.Op, caplog: pytest.LogCaptureFixture
) -> None:
    start = f"logtest::plus for {targets.here(helpers.cpu())}"
    with caplog.at_level(logging.INFO, logger="opjit"):
        first = request(op)
        assert caplog.messages[:2] == [f"{start} was never built", f"building {start}"]
        assert re.fullmatch(
            rf"built {start} in \d+\.\d\d s: {re.escape(first)}", caplog.messages[2]
        )
        assert len(caplog.messages) == 3
        caplog.clear()
        assert request(op) == first
        assert caplog.messages == [f"{start} is built already: {first}"]
        caplog.clear()
        (op.folder / "amount.h").write_text("#define AMOUNT 2.0f\n")
        request(op)
        assert caplog.messages[0] == f"{start} is not cached: amount.h changed"


def test_the_commands_are_logged_at_debug_and_those_of_a_build_that_fails_too(
    op: opjit.Op,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, logger="opjit"):
        request(op)
        compiling = [
            message
            for message in caplog.messages
            if " -c " in message and "opjit_glue.c" in message
        ]
        assert len(compiling) == 1
        assert any("-ltorch_cpu" in message and "-shared" in message for message in caplog.messages)
        # Who the compiler is.
        assert any(" -v -x c /dev/null " in message for message in caplog.messages)
        caplog.clear()
        (op.folder / "plus.c").write_text(PLUS.replace("AMOUNT;", "AMOUNT"))
        with pytest.raises(CompileError):
            request(op)
        assert (
            len(
                [
                    message
                    for message in caplog.messages
                    if " -c " in message and "opjit_glue.c" in message
                ]
            )
            == 1
        )


def test_without_a_reader_nothing_is_explained(
    op: opjit.Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opjit import why

    monkeypatch.setattr(why, "compare", Mock(side_effect=AssertionError("somebody looked")))
    request(op)
    request(op)


def test_opjit_verbose_prints_the_way_of_each_request_to_stderr_and_without_it_nothing_is_printed(
    tmp_path: Path,
) -> None:
    code = declare(write_op(tmp_path / "plus")) + USE
    # A lock of its own: others may build the same op now.
    own = {
        "OPJIT_CACHE": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
    }
    cold, warm = (fresh(code, {**own, "OPJIT_VERBOSE": "1"}) for _ in range(2))
    assert cold.stdout == warm.stdout == "[2.0]\n"
    assert [line.split(" for ")[0] for line in cold.stderr.splitlines()] == [
        "opjit: keytest::plus",
        "opjit: building keytest::plus",
        "opjit: built keytest::plus",
    ]
    [line] = warm.stderr.splitlines()
    assert re.fullmatch(r"opjit: keytest::plus for cpu \S+ is built already: .*", line)
    for value in (None, "0"):
        assert (
            fresh(
                code,
                {**own, "OPJIT_CACHE": str(tmp_path / f"silent-{value}"), "OPJIT_VERBOSE": value},
            ).stderr
            == ""
        )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("way", ["sys.{} = None", "sys.{}.close()"])
def test_a_process_without_an_output_gets_its_ops_cold_and_warm(
    tmp_path: Path, stream: str, way: str
) -> None:
    """As a daemon or a program with windows may be."""
    code = (
        declare(write_op(tmp_path / "plus"))
        + f"import os, sys\n{way.format(stream)}\nbefore = sys.stdout, sys.stderr\n"
        + USE.replace("print(", "result = str(")
        + "\nassert (sys.stdout, sys.stderr) == before\nos._exit(result != '[2.0]')"
    )
    for verbose in (None, None, "1"):
        fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache"), "OPJIT_VERBOSE": verbose})

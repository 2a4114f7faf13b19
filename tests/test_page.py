"""tests/page, which runs the rows of the benchmarks' page again."""

import re

import pytest

from tests.page import rows as page
from tests.page.readings import READINGS
from tests.page.rows import PageRow

TEXT = page.PAGE.read_text(encoding="utf-8")
ROWS = page.rows(TEXT)


def row(**changed: str) -> PageRow:
    plain = PageRow("Calls", "... warm", "26.7 ms", "50.6 ms", "1.89x", "dropin.py")
    return plain._replace(**changed)


@pytest.mark.parametrize("each", ROWS, ids=lambda each: f"{each.command}: {each.benchmark}")
def test_each_row_of_the_page_names_a_command_and_its_figure_can_be_read(each: PageRow) -> None:
    assert each.script.is_file()
    how = page.reading(each)
    patterns = [re.compile(pattern, re.MULTILINE) for pattern in how.patterns]
    groups = {name for pattern in patterns for name in pattern.groupindex}
    unit, values = page.of_page(each)
    if groups:
        assert values, "the page's figure cannot be read"
        assert unit == "s" or groups & {"peer", "times", "speed"}


def test_no_reading_is_left_of_a_row_that_the_page_does_not_have() -> None:
    known = {
        (command, how.row, how.baseline) for command, found in READINGS.items() for how in found
    }
    used = {
        (each.command, how.row, how.baseline)
        for each in ROWS
        if each.command in READINGS
        for how in [page.reading(each)]
    }
    assert known == used


def test_a_row_without_a_command_is_an_error() -> None:
    table = "## Calls\n\n| benchmark | opjit | baseline | speed-up | command |\n|---|---|---|---|---|\n| a call | 1 us |  |  |  |\n"
    with pytest.raises(ValueError, match="expected a command in the row 'a call' of Calls"):
        page.rows(table)


def test_the_summary_repeats_rows_of_the_page() -> None:
    summary = page.PAGE.with_name("README.md").read_text(encoding="utf-8")
    lines = [line for line in summary.splitlines() if line.endswith("x** |")]
    figures = {(each.opjit, each.speed_up) for each in ROWS}
    found = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    assert len(found) == 10
    assert [cells for cells in found if (cells[2], cells[4]) not in figures] == []


@pytest.mark.parametrize(
    ("output", "state"),
    [
        ("warm, in a fresh process  30 ms  50 ms  0.60x  0.20x  FAIL", "ok"),  # 1.67x
        ("warm, in a fresh process  40 ms  50 ms  0.80x", "off"),  # 1.25x
        ("warm, in a fresh process  10 ms  50 ms  1/5", "off"),  # the page is out of date
        ("cold  10 ms  50 ms  1/5", "failed"),
    ],
)
def test_a_speed_up_is_off_by_more_than_a_third(output: str, state: str) -> None:
    assert page.judged(row(), output).state == state


def test_a_time_without_a_peer_is_off_by_more_than_the_drift_of_seconds() -> None:
    each = row(
        benchmark="`opjit.get` again", opjit="107 ns", baseline="", speed_up="", command="warm.py"
    )
    states = [
        page.judged(each, f"get again  {time}  {time}  200 ns  PASS").state
        for time in ("150 ns", "2.3 us")
    ]
    assert states == ["ok", "off"]


def test_all_figures_of_a_range_are_in_it() -> None:
    each = next(each for each in ROWS if each.command == "strides.py")
    line = "transposed 1000 x 1000  loops 4 ms  1.00x  for_each {} ms  {}x  offset 18 ms 4.48x\n"
    good = line.format(4, "0.90") + line.format(4, "1.06")
    assert page.judged(each, good).state == "ok"
    assert page.judged(each, good + line.format(8, "2.01")).state == "off"


def test_the_command_prints_rows_runs_each_command_once_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(each: PageRow) -> tuple[int, str]:
        ran.append(each.command)
        return 0, "get again  2.3 us  2.3 us\nimport opjit  38 ms  38 ms\n"

    monkeypatch.setattr(page, "run", run)
    assert page.main(["warm.py"]) == 1
    assert ran == ["warm.py"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["ok", "failed", "off"]
    assert lines[3] == "1 failed, 1 off, 1 ok"


def test_rows_that_need_a_gpu_run_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--list"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert page.main(["--list", "--gpu"]) == 0
    on_gpu = capsys.readouterr().out.splitlines()
    assert len(plain) + len(on_gpu) == len(ROWS)
    assert any("collectives" in line for line in on_gpu)
    assert any(line.startswith("warm.py") for line in plain)

"""Each planted mistake is found, at its line, under any of three schedules, and no right kernel is reported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulate.programs import HERE, MORE, PLANTED, Outcome, compiled, names_a_line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FIRST = HERE / "mistakes.cu"
SECOND = HERE / "more_mistakes.cu"
SEEDS = (1, 2, 3)
# Found at another place: where the memory is read that nobody set, or at the launch.
ELSEWHERE = {FIRST: {17, 27, 33}, SECOND: set[int]()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


def _program(source: Path, folder: Path) -> Callable[[int, int, int], Outcome]:
    place = folder / source.stem
    place.mkdir(exist_ok=True)
    return compiled(source, place)


@pytest.mark.parametrize(
    ("source", "kernel"),
    [(FIRST, kernel) for kernel in range(1, 14)] + [(SECOND, kernel) for kernel in range(1, 16)],
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_a_right_kernel_is_not_reported(source: Path, kernel: int, folder: Path) -> None:
    call = _program(source, folder)
    for seed in SEEDS:
        assert call(0, kernel, seed) == (True, [])


@pytest.mark.parametrize(
    ("source", "mistake", "kernel"),
    [(FIRST, *each) for each in sorted(PLANTED.items())]
    + [(SECOND, *each) for each in sorted(MORE.items())],
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_a_mistake_is_found_at_its_line(
    source: Path, mistake: int, kernel: int, folder: Path
) -> None:
    call = _program(source, folder)
    outcomes = [call(mistake, kernel, seed) for seed in SEEDS]
    assert all(outcome.findings for outcome in outcomes), outcomes
    at_line = [names_a_line(outcome, source, mistake) for outcome in outcomes]
    assert any(at_line) or mistake in ELSEWHERE[source], outcomes

"""Drawn programs do the same whichever way opjit builds them."""

import random
from pathlib import Path

import pytest

from tests.cpp_extension.fuzz import both, grammar


def test_a_program_is_drawn_again_by_its_numbers() -> None:
    for number in range(0, 6 * len(grammar.KINDS), 6):
        assert grammar.draw(1, number) == grammar.draw(1, number)


@pytest.mark.stress
@pytest.mark.torch
@pytest.mark.timeout(3000)
def test_drawn_programs_do_what_torchs_headers_make_them_do(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    numbers = [number for number in range(6 * len(grammar.KINDS)) if number % 6 < 3]
    compared = both.compare([grammar.draw(seed, number) for number in numbers], tmp_path)
    assert [str(one) for one in compared.differences] == []
    assert len(compared.fast) > len(numbers) / 2
    assert len(compared.wrong) < len(numbers) / 5

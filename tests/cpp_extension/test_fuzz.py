"""Drawn programs do the same whichever way opjit builds them. By hand: python -m tests.cpp_extension.fuzz --minutes 60."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cpp_extension.fuzz import both, grammar
from tests.cpp_extension.fuzz.__main__ import told


def test_a_program_is_drawn_again_by_its_numbers() -> None:
    for number in range(0, 6 * len(grammar.KINDS), 6):
        case, places = grammar.draw(1, number)
        assert case == grammar.draw(1, number)[0]
        assert all(place in grammar.draw(1, number, frozenset(places[1:]))[1] for place in places[:1])


@pytest.mark.stress
@pytest.mark.torch
@pytest.mark.timeout(3000)
def test_drawn_programs_do_what_torchs_headers_make_them_do(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}: python -m tests.cpp_extension.fuzz --seed {seed} --minutes 1")
    numbers = [number for number in range(6 * len(grammar.KINDS)) if number % 6 < 3]
    compared = both.compare([grammar.draw(seed, number)[0] for number in numbers], tmp_path)
    assert [told(one) for one in compared.differences] == []
    assert len(compared.fast) > len(numbers) / 2
    assert len(compared.wrong) < len(numbers) / 5

"""The checks find a barrier or an atomic that is missing in opjit's kernels."""

import pytest

from tests.emulate.mutants import around, found_at, mutants

FOUND = 16  # of 18, at a line of the function


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_missing_barrier_or_atomic_is_found_at_its_lines(no_gpu: None) -> None:
    missed = []
    for mutant in mutants():
        lines, finding = found_at(mutant)
        if not around(mutant) & set(lines):
            missed.append((mutant, finding))
    assert len(mutants()) == 18
    assert len(mutants()) - len(missed) >= FOUND, missed

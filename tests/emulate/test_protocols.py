"""Hand-made signals between two ranks: fences and atomics below system scope order nothing, and a wait must acquire."""

from collections.abc import Callable

import pytest

from tests.emulate.programs import HERE, Outcome, compiled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RIGHT_SIGNALS = {
    0: "st.release.sys",
    1: "fence, atomicExch_system",
    2: "fence, volatile store",
    3: "fence, st.relaxed.sys",
    4: "fence, atomicAdd_system",
    5: "fence.acq_rel.sys, st.volatile",
    6: "red.release.sys.add",
    7: "membar.sys, atomicCAS_system",
}
WRONG_SIGNALS = {
    20: "st.release.gpu",
    21: "fence of the device, atomicExch_system",
    22: "fence, atomicExch",
    23: "fence of the device, st.relaxed.sys",
    24: "atomicExch_system",
    25: "st.relaxed.sys",
    26: "fence.acq_rel.gpu, volatile store",
    27: "fence of the block, atomicExch_system",
    28: "fence, st.relaxed.gpu",
    29: "red.relaxed.sys.add",
    30: "atomicExch_system, fence",
    31: "fence of the device, atomicExch",
    32: "red.release.gpu.add",
}
RIGHT_WAITS = {
    0: "ld.acquire.sys",
    1: "ld.relaxed.sys, fence",
    2: "volatile load, fence",
    3: "atomicAdd_system, fence",
    4: "ld.volatile, fence.sc.sys",
    5: "atom.acquire.sys.add",
}
WRONG_WAITS = {
    20: "ld.acquire.gpu",
    21: "atomicAdd, fence",
    22: "fence, ld.relaxed.sys",
    23: "volatile load",
    24: "ld.relaxed.sys, fence of the device",
    25: "atomicAdd",
    26: "ld.relaxed.sys, fence of the block",
    27: "ld.relaxed.gpu, fence",
    28: "atom.acquire.gpu.add",
}
SEEDS = (1, 2, 3)
Call = Callable[[int, int, int], Outcome]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Call:
    return compiled(HERE / "protocols.cu", tmp_path_factory.mktemp("protocols"))


@pytest.mark.parametrize("wait", RIGHT_WAITS, ids=RIGHT_WAITS.get)
@pytest.mark.parametrize("signal", RIGHT_SIGNALS, ids=RIGHT_SIGNALS.get)
def test_a_right_protocol_is_not_reported(signal: int, wait: int, call: Call) -> None:
    for seed in SEEDS:
        assert call(signal, wait, seed) == (True, [])


def _is_found(outcome: Outcome) -> bool:
    return any("race on `data " in each and "the two ranks" in each for each in outcome.findings)


@pytest.mark.parametrize("wait", [0, 1], ids=RIGHT_WAITS.get)
@pytest.mark.parametrize("signal", WRONG_SIGNALS, ids=WRONG_SIGNALS.get)
def test_a_signal_that_releases_nothing_to_another_rank_is_found(
    signal: int, wait: int, call: Call
) -> None:
    for seed in SEEDS:
        outcome = call(signal, wait, seed)
        assert _is_found(outcome), outcome


@pytest.mark.parametrize("signal", [0, 1], ids=RIGHT_SIGNALS.get)
@pytest.mark.parametrize("wait", WRONG_WAITS, ids=WRONG_WAITS.get)
def test_a_wait_that_acquires_nothing_from_another_rank_is_found(
    signal: int, wait: int, call: Call
) -> None:
    for seed in SEEDS:
        outcome = call(signal, wait, seed)
        assert _is_found(outcome), outcome


@pytest.mark.parametrize("signal", [20, 22, 28, 31, 32], ids=WRONG_SIGNALS.get)
def test_an_atomic_below_system_scope_is_no_atomic_for_another_rank(
    signal: int, call: Call
) -> None:
    found = [each for seed in SEEDS for each in call(signal, 0, seed).findings]
    assert any("race on `signal " in each and "_system" in each for each in found), found

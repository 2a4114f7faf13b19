"""Kernels with the functions of opjit_mma.h: right ones are not reported, and a mistake is found at its line."""

from collections.abc import Callable

import pytest

from tests.emulate.programs import HERE, Outcome, compiled, names_a_line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOURCE = HERE / "tensor_cores.cu"
SEEDS = (1, 2, 3)
KERNELS = {
    1: "TMA and wgmma in a pipeline",
    2: "tiles loaded and stored by TMA",
    3: "cp.async, ldmatrix and mma.sync",
    4: "a cluster's shared memory",
    5: "multicast to a pair of blocks",
    6: "barriers with a number",
    7: "wgmma of all layouts",
    8: "types of mma.sync, stmatrix",
    9: "tiles of three dimensions with each swizzle",
    10: "shared memory beyond 48 KiB",
}
MISTAKES = {
    1: (1, "a wrong parity"),
    2: (1, "no expect_tx"),
    3: (1, "too many bytes expected"),
    4: (1, "too few bytes expected"),
    5: (1, "tiles overwritten without a wait for their readers"),
    6: (1, "an arrival before the product has ended"),
    7: (1, "sums read before wait_group"),
    8: (1, "no commit_group of wgmma"),
    9: (1, "a tile loaded with another swizzle"),
    10: (1, "no wgmma.fence"),
    11: (1, "no fence after mbarrier.init"),
    12: (1, "no barrier after mbarrier.init"),
    13: (1, "the mbarrier of another stage"),
    14: (1, "a parity that never changes"),
    20: (2, "no fence.proxy.async before a store by TMA"),
    21: (2, "no barrier before a store by TMA"),
    22: (2, "a tile overwritten while TMA stores it"),
    23: (2, "an end before TMA has read"),
    24: (2, "a count that is too small"),
    25: (2, "no commit_group of TMA"),
    30: (3, "no wait for cp.async"),
    31: (3, "no barrier after the wait for cp.async"),
    32: (3, "no commit_group of cp.async"),
    33: (3, "a tile overwritten by cp.async"),
    34: (3, "a misaligned row"),
    35: (3, "ldmatrix without one lane"),
    40: (4, "no barrier before the reads of other blocks"),
    41: (4, "an end before others have read"),
    42: (4, "a block beyond the cluster"),
    43: (4, "a barrier of the block for the cluster"),
    50: (5, "no barrier of the cluster after mbarrier.init"),
    51: (5, "a count without the other block"),
    52: (5, "a mask without the other block"),
    53: (5, "no arrival of the other block"),
    54: (5, "an end before the last arrival of the other block"),
    60: (6, "another number of threads"),
    61: (6, "a barrier that only the readers reach"),
    70: (7, "no fence.proxy.async before wgmma"),
    71: (7, "no barrier before wgmma"),
    72: (7, "sums changed before wait_group"),
    73: (7, "a tile written before wait_group"),
    90: (9, "no mbarrier.init"),
    91: (9, "a tile at no multiple of 128 bytes"),
    92: (9, "no wait for a tile"),
    93: (9, "no __syncwarp after one lane's wait"),
    100: (10, "shared memory that is allowed for another kernel"),
}
Call = Callable[[int, int, int], Outcome]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Call:
    return compiled(SOURCE, tmp_path_factory.mktemp("tensor_cores"))


@pytest.mark.parametrize("kernel", KERNELS, ids=KERNELS.get)
def test_a_right_kernel_is_not_reported(kernel: int, call: Call) -> None:
    for seed in SEEDS:
        assert call(0, kernel, seed) == (True, [])


@pytest.mark.parametrize("mistake", MISTAKES, ids=[what for _, what in MISTAKES.values()])
def test_a_mistake_is_found_at_its_line(mistake: int, call: Call) -> None:
    kernel, _ = MISTAKES[mistake]
    for seed in SEEDS:
        outcome = call(mistake, kernel, seed)
        assert names_a_line(outcome, SOURCE, mistake), outcome

"""How low a time can be on a CPU, where the work of an op itself is nothing: the limits of torch and of the machine.

    python tests/benchmarks/floors.py

A row compares the least that any op needs with torch's own time, and with the bar that is set for opjit's op. FAIL says that no op that
torch calls as an operator meets the bar on this machine.

    operator        a C++ operator (TORCH_LIBRARY, peers/call_ext.cpp) that allocates its result and does nothing else, against
                    torch's function, which has a Python binding of its own
    read            a C op that reads the memory once and keeps nothing, with as many threads as torch has
    multiplications a C op that makes as many multiplications and additions, in registers, as the product of an LLTM cell of batch 16,
                    32 features and 128 states takes and 12 for each value of its four functions; called by an nn.Module in no_grad
                    mode with one thread, as in lltm.py

opjit's own column in the other benchmarks cannot be below these. Sides take turns; a table holds medians of rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

import torch
from common import HERE, Row, load_peer, path_with_tools, ratio, show
from elementwise import arguments
from lltm import Call, calls, duel

import opjit
from opjit.catalog import registry

sys.path.insert(0, str(HERE.parents[1] / "examples" / "05_lltm"))
from cells import LLTM, State, make

BATCH = 16
FEATURES = 32
STATE = 128
MULTIPLICATIONS = BATCH * 3 * STATE * (FEATURES + STATE) + 4 * BATCH * STATE * 12


class Multiplications(LLTM):
    """An LLTM cell that is right in its parameters and in how much it multiplies, and in nothing else."""

    def forward(self, x: torch.Tensor, state: State) -> State:
        new_h, new_cell = torch.ops.opjit_bench.multiply_add.default(state[0], MULTIPLICATIONS)
        return new_h, new_cell


def against(what: str, floor: Call, peer: Call, bar: float, rounds: int) -> Row:
    spent = duel({"floor": floor, "torch": peer}, rounds)
    return ratio(what, spent["floor"], spent["torch"], bar)


def operators(rounds: int) -> Iterator[Row]:
    scalar = torch.ops.peer.scalar.default
    like = torch.ops.peer.like.default
    for power, bar in ((10, 1.05), (12, 0.8), (14, 0.8)):
        x = torch.randn(1 << power)
        yield against(
            f"operator, sum of float32 2^{power}",
            partial(scalar, x),
            partial(torch.sum, x),
            bar,
            rounds,
        )
    for name in ("add_custom", "round_ste", "tensor_negate"):
        args = arguments(name, 12, torch.float32, "cpu")
        reference = partial(registry.find(name).reference_function, *args)
        yield against(
            f"operator, {name} of float32 2^12", partial(like, args[0]), reference, 1.0, rounds
        )


def reads(rounds: int) -> Iterator[Row]:
    read = opjit.get("opjit_bench::read", "cpu")
    for power in range(15, 21):
        x = torch.randn(1 << power)
        yield against(
            f"read, sum of float32 2^{power}", partial(read, x), partial(torch.sum, x), 0.8, rounds
        )


def cell(rounds: int) -> Row:
    opjit.get("opjit_bench::multiply_add", "cpu")
    x, *state = (torch.randn(BATCH, width).requires_grad_() for width in (FEATURES, STATE, STATE))
    cells = Multiplications(FEATURES, STATE), make("py", FEATURES, STATE, torch.float32, "cpu")
    floor, plain = (
        calls(each, each.parameters(), x, tuple(state))["forward, no_grad"] for each in cells
    )
    return against("multiplications, LLTM forward, no_grad", floor, plain, 0.35, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    os.environ["PATH"] = path_with_tools()
    registry.declare_folder(HERE / "ops" / "floors")
    with tempfile.TemporaryDirectory() as build, torch.inference_mode():
        load_peer(["call_ext.cpp"], build)
        show(
            f"The least that an op can take on the CPU, {torch.get_num_threads()} threads (medians)",
            [*operators(rounds), *reads(rounds)],
            ("floor", "torch"),
        )
        torch.set_num_threads(1)
        alone = [*reads(rounds)]
    show("The same with one thread", [*alone, cell(rounds)], ("floor", "torch"))


if __name__ == "__main__":
    main()

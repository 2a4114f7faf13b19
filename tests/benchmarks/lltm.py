"""The LLTM cell, as the nn.Modules of examples/05_lltm: opjit's op against torch's ops in Python, C++ and torch.compile.

    python tests/benchmarks/lltm.py           the CPU with one thread, and a GPU where there is one
    python tests/benchmarks/lltm.py --cpp     also the C++ extension, which takes most of a minute to build

The sizes are batch 16, features 32, state 128 (with bars) and batch 64, features 128, state 512; float32. A row is

    forward, no_grad      one call
    forward               one call that autograd records; parameters and inputs require gradients
    backward              gradients of the parameters and inputs, through a graph that is kept
    forward and backward  both

Sides take turns; a table holds medians of rounds. On a GPU a round's calls are issued back to back and synchronized at its
end. "device" rows are replays of a CUDA graph of the op and of its reference: what is left without the host. Values are
checked first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from common import HERE, Row, ratio, show
from torch._functorch import config as functorch
from torch.utils.benchmark import Timer

import opjit
from opjit.catalog import registry

sys.path.insert(0, str(HERE.parents[1] / "examples" / "05_lltm"))
from cells import make

SIZES = ((16, 32, 128), (64, 128, 512))
ROUND_SECONDS = 0.02
IN_GRAPH = 50
Call = Callable[[], Any]
# (what, peer) -> the most that opjit may take of the peer's time, at the first size and at the second
CPU_BARS = {
    ("forward, no_grad", "py"): (0.8, 1.0),
    ("forward", "py"): (0.8, 1.0),
    ("forward and backward", "py"): (0.8, 1.0),
}
CUDA_BARS = {
    ("forward, no_grad", "py"): (0.4, 1.0),
    ("forward", "py"): (0.4, 1.0),
    ("forward, no_grad", "compile"): (0.5, 1.0),
    ("forward", "compile"): (0.5, 1.0),
    ("backward", "py"): (0.6, 1.0),
}


def calls(
    cell: Callable[..., Any],
    parameters: Iterable[torch.Tensor],
    x: torch.Tensor,
    state: tuple[torch.Tensor, ...],
) -> dict[str, Call]:
    """What is measured of one side, by the name of its row."""
    leaves = (x, *state, *parameters)
    grads = (torch.ones_like(state[0]), torch.full_like(state[1], 0.5))
    kept = cell(x, state)

    def no_grad() -> Any:
        with torch.no_grad():
            return cell(x, state)

    def backward(results: Any = kept, keep: bool = True) -> Any:
        return torch.autograd.grad(results, leaves, grads, retain_graph=keep)

    return {
        "forward, no_grad": no_grad,
        "forward": lambda: cell(x, state),
        "backward": backward,
        "forward and backward": lambda: backward(cell(x, state), False),
    }


def duel(sides: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of every side; they take turns."""
    timers = {
        name: Timer("f()", globals={"f": call}, num_threads=torch.get_num_threads())
        for name, call in sides.items()
    }
    for timer in timers.values():
        timer.timeit(10)
    counts = {
        name: max(3, min(2_000, int(ROUND_SECONDS / timer.timeit(3).median)))
        for name, timer in timers.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            spent[name].append(timers[name].timeit(counts[name]).mean)
    return spent


def check(sides: dict[str, dict[str, Call]]) -> None:
    """Stop unless all sides give the same results and gradients."""
    for name, of in sides.items():
        for what in ("forward", "backward"):
            for got, wanted in zip(of[what](), sides["py"][what](), strict=True):
                if not torch.allclose(got, wanted, rtol=1e-3, atol=1e-4):
                    raise SystemExit(
                        f"{name}, {what}: off by up to {(got - wanted).abs().max().item():.1e}"
                    )


def replayed(call: Call) -> Call:
    """A CUDA graph of a number of calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    return graph.replay


def device_rows(sizes: tuple[int, int, int], rounds: int) -> list[Row]:
    """The two ops and their references without the host's share."""
    rows = []
    for name in ("lltm_forward", "lltm_backward"):
        op = registry.find(name)
        called = opjit.get(name, "cuda")
        label = "B{} F{} S{}".format(*sizes)
        work = next(work for work in op.workloads_on("cuda") if work.label == label)
        with torch.inference_mode():
            sides: dict[str, Callable[..., Any]] = {"opjit": called, "torch": op.reference_function}
            spent = duel(
                {side: replayed(partial(function, *work.args)) for side, function in sides.items()},
                rounds,
            )
        per_call = {
            side: [seconds / IN_GRAPH for seconds in found] for side, found in spent.items()
        }
        rows.append(ratio(f"{name}, device, torch's ops", per_call["opjit"], per_call["torch"]))
    return rows


def measure(sizes: tuple[int, int, int], device: str, peers: list[str], rounds: int) -> list[Row]:
    batch, features, state_size = sizes
    generator = torch.Generator().manual_seed(1)
    x, *state = (
        torch.randn(batch, width, generator=generator).to(device).requires_grad_()
        for width in (features, state_size, state_size)
    )
    variants = {
        "opjit": "cuda" if device == "cuda" else "c",
        "py": "py",
        "cpp": "cpp",
        "compile": "py",
    }
    sides = {}
    for side in ("opjit", *peers):
        cell = make(variants[side], features, state_size, torch.float32, device)
        called = torch.compile(cell, fullgraph=True) if side == "compile" else cell
        sides[side] = calls(called, cell.parameters(), x, tuple(state))
    check(sides)
    bars = CUDA_BARS if device == "cuda" else CPU_BARS
    rows = []
    for what in sides["opjit"]:
        spent = duel({side: of[what] for side, of in sides.items()}, rounds)
        for peer in peers:
            bar = bars.get((what, peer))
            rows.append(
                ratio(
                    f"{what}, {peer}",
                    spent["opjit"],
                    spent[peer],
                    None if bar is None else bar[SIZES.index(sizes)],
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpp", action="store_true", help="measure the C++ extension, too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="only there")
    options = parser.parse_args()
    cpp = ["cpp"] if options.cpp else []
    torch.set_num_threads(1)
    functorch.donated_buffer = False  # the backward is measured on a graph that is kept
    for device in (
        [options.device]
        if options.device
        else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    ):
        for sizes in SIZES:
            compiled = ["compile"] if device == "cuda" else []
            rows = measure(sizes, device, ["py", *cpp, *compiled], options.rounds)
            rows += device_rows(sizes, options.rounds) if device == "cuda" else []
            where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, one thread"
            show(
                "LLTM, batch {}, features {}, state {}, float32, on {}".format(*sizes, where), rows
            )


if __name__ == "__main__":
    main()

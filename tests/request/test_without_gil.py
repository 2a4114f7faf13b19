"""Threads that declare, load, call, reload and prune at once: under the GIL they take turns, without it they do not."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import opjit
from opjit.store import prune
from tests.helpers import elementwise

INCLUDE = '#include "opjit.h"\n'
WITHOUT_GIL = [
    pytest.mark.slow,
    pytest.mark.skipif(
        getattr(sys, "_is_gil_enabled", lambda: True)(),
        reason="this Python has the GIL; python3.13t and python3.14t have none",
    ),
]


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=WITHOUT_GIL)])
def test_8_threads_load_and_call_ops_while_others_declare_reload_and_prune(
    rounds: int, make_op: Callable[..., opjit.Op], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "_FRESH", 10.0)  # seconds, for an hour
    x = torch.zeros(3)
    begun = [0]
    done = [0]
    stopped = threading.Event()
    edited = make_op(
        "count(Tensor x) -> Tensor", elementwise("count", "from[i] + 0"), fake=torch.empty_like
    )
    made = [
        make_op(
            "add(Tensor x) -> Tensor",
            elementwise("add", f"from[i] + {turn}"),
            fake=torch.empty_like,
        )
        for turn in range(rounds)
    ]
    start = threading.Barrier(8, timeout=100)

    def work(number: int) -> int:
        for turn, op in enumerate(made):
            start.wait()
            call = (
                op,
                getattr(torch.ops, op.schema.namespace).add,
                opjit.get(op.qualified, "cpu"),
            )[number % 3]
            for _ in range(200):
                low = done[0]
                assert call(x).tolist() == [turn] * 3
                assert low <= edited(x)[0].item() <= begun[0]
        return number

    def declare() -> None:
        op = opjit.inline(
            "threads::twice(Tensor x) -> Tensor",
            c=INCLUDE + elementwise("twice", "from[i] + from[i]"),
            like="x",
        )
        assert op(x + 1).tolist() == [2] * 3

    def reload() -> None:
        begun[0] += 1
        (edited.folder / "count.c").write_text(
            INCLUDE + elementwise("count", f"from[i] + {begun[0]}")
        )
        assert opjit.reload(edited.qualified, "cpu")(x)[0].item() == begun[0]
        done[0] = begun[0]

    def repeat(step: Callable[[], object]) -> None:
        step()
        while not stopped.wait(0.01):
            step()

    with ThreadPoolExecutor(11) as pool:
        others = [
            pool.submit(repeat, step) for step in (declare, reload, lambda: opjit.cache.prune(1))
        ]
        try:
            assert list(pool.map(work, range(8))) == list(range(8))
        finally:
            stopped.set()
        for each in others:
            each.result()

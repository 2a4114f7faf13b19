"""Sums of scattered elements, additions of two dtypes or one, and small calls, against torch: CPU time of one thread.

    python tests/benchmarks/cpu_kernels.py [WORD...]

A line is measured if it contains one of the words. Results are checked first, and sides take turns; a table holds medians of rounds.
The small calls have two peers: torch.add and torch.neg have Python bindings that are faster than any operator, and torch.ops.aten.add
and neg take the path through torch.ops that every op takes. OPJIT_ARCH=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 measures both sides as on a
CPU without AVX-512.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations_with_replacement
from time import thread_time

import torch
from common import DTYPES, Row, ratio, show

import opjit

ROUNDS = 15
SECONDS = 0.004  # of a side's turn, at least
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8)
# Of 2^20 elements in order.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x[::2]": lambda x: x[::2],
    "x[::3]": lambda x: x[::3],
    "3 of 4 columns": lambda x: x.view(-1, 4)[:, :3],
    "10 of 16 columns": lambda x: x.view(-1, 16)[:, :10],
    "100 of 1024 columns": lambda x: x.view(-1, 1024)[:, :100],
    "1000 of 1024 columns": lambda x: x.view(-1, 1024)[:, :1000],
    "every 7th column": lambda x: x.view(-1, 1024)[:, ::7],
    "x[::2, ::2]": lambda x: x.view(1024, 1024)[::2, ::2],
    "x[::2, ::2, ::2]": lambda x: x.view(128, 128, 64)[::2, ::2, ::2],
    "30 x 30 of 32 x 32": lambda x: x.view(-1, 32, 32)[:, 1:-1, 1:-1],
    "4 x 4 of 8 x 8": lambda x: x.view(-1, 8, 8)[:, 2:6, 2:6],
    "overlapping windows": lambda x: x[: 1 << 18].unfold(0, 8, 2),
}


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(3)).to(dtype)


def seconds_of_call(call: Callable[[], torch.Tensor], times: int) -> float:
    start = thread_time()
    for _ in range(times):
        call()
    return (thread_time() - start) / times


def against(what: str, ours: Callable[[], torch.Tensor], peer: Callable[[], torch.Tensor]) -> Row:
    sides = (ours, peer)
    counts = [int(SECONDS / seconds_of_call(side, 5)) + 1 for side in sides]
    spent: tuple[list[float], ...] = ([], [])
    for turn in range(ROUNDS + 1):
        for index in (0, 1) if turn % 2 else (1, 0):
            spent[index].append(seconds_of_call(sides[index], counts[index]))
    return ratio(what, spent[0][1:], spent[1][1:])  # the first round warms up


def sums(words: Sequence[str]) -> Iterator[Row]:
    op = opjit.get("allreduce", "cpu")
    for dtype in SUMMED:
        for name, layout in LAYOUTS.items():
            what = f"sum of {str(dtype).removeprefix('torch.')}, {name}"
            if not is_chosen(what, words):
                continue
            x = layout(numbers(1 << 20, dtype))
            expected = x.double().sum().to(op(x).dtype)
            torch.testing.assert_close(op(x), expected)
            yield against(what, partial(op, x), partial(torch.sum, x))


def additions(words: Sequence[str]) -> Iterator[Row]:
    op = opjit.get("add_custom", "cpu")
    for one, two in combinations_with_replacement(DTYPES, 2):
        what = " + ".join(str(dtype).removeprefix("torch.") for dtype in (one, two))
        if not is_chosen(what, words):
            continue
        x = numbers(1 << 16, one)
        y = numbers(1 << 16, two)
        torch.testing.assert_close(op(x, y), torch.add(x, y), rtol=0, atol=0)
        yield against(what, partial(op, x, y), partial(torch.add, x, y))


def calls(words: Sequence[str]) -> Iterator[Row]:
    functions = (
        ("add_custom", 2, torch.add, torch.ops.aten.add.Tensor),
        ("tensor_negate", 1, torch.neg, torch.ops.aten.neg.default),
    )
    for name, count, function, operator in functions:
        for power in (3, 12):
            op = opjit.get(name, "cpu")
            args = [numbers(1 << power, torch.float32)] * count
            torch.testing.assert_close(op(*args), function(*args), rtol=0, atol=0)
            for peer, called in (("function", function), ("operator", operator)):
                what = f"{name} of 2^{power}, against torch's {peer}"
                if is_chosen(what, words):
                    yield against(what, partial(op, *args), partial(called, *args))


def is_chosen(what: str, words: Sequence[str]) -> bool:
    return not words or any(word in what for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of the lines to run")
    words = parser.parse_args().words
    torch.set_num_threads(1)
    with torch.inference_mode():
        for title, rows, peer in (
            ("Sums of scattered elements", sums(words), "torch.sum"),
            ("Additions of 2^16 elements", additions(words), "torch.add"),
            ("Small calls", calls(words), "torch"),
        ):
            if measured := list(rows):
                show(f"{title}, CPU time", measured, ("opjit", peer))


if __name__ == "__main__":
    main()

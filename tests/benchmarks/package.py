"""An op in a package of AOTInductor: a call is no dearer than one of torch's own functions, add_custom against aten::add.

    python tests/benchmarks/package.py

Three models add 100 times, each call on the result of the one before it: by opjit's op, which `opjit.aoti_compile_and_package` has the
model call directly; by the same op through torch's proxy executor and dispatcher, as torch alone packages it; and by aten::add, which is
kept out of the model's own kernels, as functions without a lowering are. One thread; results are checked first.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Row, ratio, show
from torch._inductor import lowering
from torch.utils.benchmark import Timer

import opjit

CALLS = 100
ROUNDS = 41
ADD = torch.ops.aten.add.Tensor


class Sum(torch.nn.Module):
    def __init__(self, add: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.add = add

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            y = self.add(y, x)
        return y


def measure(numel: int, folder: str) -> list[Row]:
    sides: dict[str, tuple[Callable[..., Any], Callable[..., str]]] = {
        "direct": (torch.ops.opjit.add_custom, opjit.aoti_compile_and_package),
        "dispatcher": (torch.ops.opjit.add_custom, torch._inductor.aoti_compile_and_package),
        "aten": (ADD, torch._inductor.aoti_compile_and_package),
    }
    args = (torch.ones(numel), torch.zeros(numel))
    timers = {}
    spent = dict[str, list[float]]()
    for side, (add, package) in sides.items():
        path = package(
            torch.export.export(Sum(add), args),
            package_path=str(Path(folder, f"{side}{numel}.pt2")),
        )
        model = torch._inductor.aoti_load_package(path)
        if not torch.equal(model(*args), torch.full((numel,), float(CALLS))):
            raise SystemExit(f"{side}: the sum is wrong")
        timers[side] = Timer("model(*args)", globals={"model": model, "args": args})
    for turn in range(ROUNDS):
        for side in list(sides) if turn % 2 else reversed(list(sides)):
            spent.setdefault(side, []).append(
                timers[side].timeit(max(3, 20_000 // (60 + numel // 8))).mean / CALLS
            )
    return [
        ratio(f"{numel} elements, called directly", spent["direct"], spent["aten"], 1.02),
        ratio(f"{numel} elements, through the dispatcher", spent["dispatcher"], spent["aten"]),
    ]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own
    for known in (ADD, torch.ops.aten.add):
        lowering.lowerings.pop(known, None)
    lowering.make_fallback(ADD, warn=False, override_decomp=True)
    with tempfile.TemporaryDirectory() as folder:
        show(
            "A call in a package of AOTInductor",
            [row for numel in (8, 1 << 16) for row in measure(numel, folder)],
            ("opjit", "aten"),
        )


if __name__ == "__main__":
    main()

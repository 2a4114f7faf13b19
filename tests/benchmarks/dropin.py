"""What opjit.load costs beside torch.utils.cpp_extension.load of the same pybind11 module over torch/extension.h.

    python tests/benchmarks/dropin.py

    warm    the extension is built already: each side's import and load, in a fresh process
    cold    nothing is built: the same, half a minute a time, so with fewer rounds

The clock starts after `import torch` and stops when the module is there; then one result is checked. The sides take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import HERE, Row, child, ratio, show

SOURCE = """\
#include <torch/extension.h>

at::Tensor scaled(at::Tensor x, double a) { return x * a; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scaled", &scaled, "x times a"); }
"""
SIDES = ("opjit", "torch")


def loaded(side: str, folder: Path) -> float:
    """Seconds of one fresh process of a side, whose builds are in the folder."""
    (folder / side).mkdir(exist_ok=True)
    env = {"OPJIT_CACHE": str(folder / side), "TORCH_EXTENSIONS_DIR": str(folder / side)}
    return float(child(HERE / "dropin_child.py", side, str(folder / "scaled.cpp"), env=env)["seconds"])


def measure(rounds: int, cold_rounds: int) -> list[Row]:
    cold: dict[str, list[float]] = {side: [] for side in SIDES}
    warm: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(cold_rounds):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "scaled.cpp").write_text(SOURCE, encoding="utf-8")
            for side in SIDES if turn % 2 else reversed(SIDES):
                cold[side].append(loaded(side, folder))
            if turn == 0:
                for _ in range(rounds):
                    for side in SIDES:
                        warm[side].append(loaded(side, folder))
    return [ratio("warm, in a fresh process", warm["opjit"], warm["torch"], 0.2),
            ratio("cold", cold["opjit"], cold["torch"], 1.03)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of warm loads")
    parser.add_argument("--cold-rounds", type=int, default=3)
    options = parser.parse_args()
    show("opjit.load against torch.utils.cpp_extension.load, imports included (medians)",
         measure(options.rounds, max(1, options.cold_rounds)))


if __name__ == "__main__":
    main()

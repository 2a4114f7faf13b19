"""How well runs of `opjit bench` agree: five fresh processes measure the same binary.

    python tests/benchmarks/repeat.py [OP] [DEVICE]

A line for each workload: the median, and the range of the five over it. The bar is 1 % on a quiet GPU.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 5


def main(op: str = "tensor_negate", device: str = "cuda") -> None:
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        for _ in range(RUNS):
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "opjit",
                    "bench",
                    op,
                    "--device",
                    device,
                    "--json",
                    "--output",
                    str(file),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            for row in json.loads(file.read_text(encoding="utf-8")):
                seconds.setdefault(row["label"], []).append(row["opjit"])
    for label, found in seconds.items():
        middle = statistics.median(found)
        print(f"{label:<24} {middle * 1e6:10.2f} us  {(max(found) - min(found)) / middle:7.2%}")


if __name__ == "__main__":
    main(*sys.argv[1:])

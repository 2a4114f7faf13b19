"""From nothing to an op that is built, tested and measured: four commands, as a user types them, with an empty cache.

    python tests/benchmarks/new.py

    opjit new mylib::scale_add --backward --cuda; opjit get, test and bench ./scale_add

The op is built for the devices that are there. A command that fails ends the benchmark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from time import perf_counter

from common import Row, alone, path_with_tools, show

COMMANDS = (
    ("new", "mylib::scale_add", "--backward", "--cuda"),
    ("get", "./scale_add"),
    ("test", "./scale_add"),
    ("bench", "./scale_add"),
)
BAR = 30.0  # seconds for all


def main() -> None:
    rows: list[Row] = []
    spent = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PATH": path_with_tools(), "OPJIT_CACHE": cache}
        for command in COMMANDS:
            start = perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "opjit", *command],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            spent.append(perf_counter() - start)
            if done.returncode != 0:
                sys.exit(f"opjit {' '.join(command)} failed:\n{done.stdout}")
            rows.append(alone(f"opjit {' '.join(command)}", [spent[-1]]))
    show("A new op, from the template to its table", [*rows, alone("all four", [sum(spent)], BAR)])


if __name__ == "__main__":
    main()

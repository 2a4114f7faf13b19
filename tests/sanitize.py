"""Run all bundled CUDA kernels under NVIDIA's compute-sanitizer: ``python -m tests.sanitize [TOOL...]``, memcheck, racecheck, initcheck and
synccheck if none is named; and, with memcheck, graphs of them and of LLTM's training step, whose scratch memory is the graph's.

It prints a line for each tool, and the whole report of one that found something. The exit code is 1 then, and 77 where nothing can run."""

import re
import subprocess
import sys
from time import monotonic

import torch

from opjit.catalog import registry
from opjit.testing import sanitize
from tests import helpers

GRAPHS = "from tests.kernels_c.test_graphs import share; share(rounds=1)"
SKIPPED = 77


def graphs(tool: str) -> subprocess.CompletedProcess[str]:
    """Capture and replay under memcheck. torch's allocator keeps its blocks, as a capture needs it to."""
    return subprocess.run(
        [*sanitize.command(tool, "memcheck"), "-c", GRAPHS],
        env=helpers.environment(),
        text=True,
        check=False,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def main(names: list[str]) -> int:
    tool = sanitize.find_tool()
    missing = (
        "compute-sanitizer was not found: it comes with the CUDA Toolkit" if tool is None else ""
    )
    missing = (
        missing if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA GPU"
    )
    if tool is None or missing:
        print(f"Skipped: {missing}. No kernel was checked.")
        return SKIPPED
    known = map(registry.find, helpers.BUNDLED)
    ops = [op for op in known if "cuda" in op.backends() and not helpers.is_across_ranks(op)]
    print(
        f"{tool}, torch {torch.__version__}, {torch.cuda.get_device_name()}: {', '.join(op.qualified for op in ops)}",
        flush=True,
    )
    found = False
    for name in names or [*sanitize.FOR_CUDA, "graphs"]:
        begin = monotonic()
        done = graphs(tool) if name == "graphs" else sanitize.under_tool(tool, name, ops)
        calls = sum(map(int, re.findall(r"^\S+: (\d+) calls$", done.stdout, re.MULTILINE)))
        what = "captured and replayed under memcheck" if name == "graphs" else f"{calls} calls"
        print(
            f"{name:<10} {'clean' if done.returncode == 0 else 'FAILED'}  {what}, {monotonic() - begin:.0f} s",
            flush=True,
        )
        if done.returncode:
            found = True
            print(
                f"exit code {done.returncode} ({sanitize.FOUND} is the tool's):\n{done.stdout}",
                flush=True,
            )
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

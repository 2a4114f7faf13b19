"""CPU seconds of Python and of compilers: first and later ops and extensions, from an empty cache on.

    python tests/benchmarks/cpu_seconds.py [--rounds 3] [--against CHECKOUT]

Each step is a fresh process with the cache of the steps before it. The clocks start after `import torch`.

    import              import opjit
    first op            `opjit.get("allreduce", "cpu")`, with the number of opjit's modules that the process has then
    another op          a C op of two lines in a cache that has an op
    op again            the same op, which the cache has
    next op             a third op, in a process that has built one; without the imports
    first program       `opjit.load_inline` of one C++ function
    second program, third program, program again

A figure is the least of the rounds. With --against, the same steps run with opjit of another checkout, taking turns, for example of
an older commit in a worktree.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from time import process_time
from typing import Any

import torch
from common import HERE, child

ROOT = HERE.parents[1]
OP = """
opjit_status NAME_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    return OPJIT_OK;
}
"""
STEPS = (
    "import",
    "first op",
    "another op",
    "op again",
    "next op",
    "first program",
    "second program",
    "third program",
    "program again",
)


def spent() -> tuple[float, float]:
    """CPU seconds of this process, and of the tools that it ran."""
    tools = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time(), tools.ru_utime + tools.ru_stime


def build_op(name: str) -> None:
    import opjit

    schema = f"cpu_seconds::{name}(Tensor x) -> Tensor"
    opjit.inline(schema, c=OP.replace("NAME", name), like="x")(torch.ones(3))


def run(step: str) -> None:
    """Do a step in this process, and print its CPU seconds as JSON."""
    if step == "next op":
        build_op("before")
    before = spent()
    import opjit

    if step == "first op":
        opjit.get("allreduce", "cpu")
    elif step in ("another op", "op again"):
        build_op("same")
    elif step == "next op":
        build_op("next")
    elif step != "import":
        which = "third" if "again" in step else step.partition(" ")[0]
        source = f"at::Tensor {which}(at::Tensor x) {{ return x + x; }}"
        opjit.load_inline(f"cpu_seconds_{which}", source, functions=which)
    python, tools = (after - begun for begun, after in zip(before, spent(), strict=True))
    modules = [name for name in sys.modules if name.partition(".")[0] == "opjit"]
    print(json.dumps({"python": python, "tools": tools, "modules": len(modules)}))


def measured(roots: list[Path], rounds: int) -> dict[tuple[Path, str], dict[str, Any]]:
    """The least of each figure, by the checkout and the step."""
    found: dict[tuple[Path, str], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="cpu-seconds-") as scratch:
            for step in STEPS:
                for number, root in enumerate(roots):
                    env = {"PYTHONPATH": str(root), "OPJIT_CACHE": f"{scratch}/cache{number}"}
                    found[root, step].append(child(Path(__file__), "--step", step, env=env))
    return {
        key: {name: min(each[name] for each in results) for name in results[0]}
        for key, results in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step:
        run(chosen.step)
        return
    roots = [ROOT, *([chosen.against.resolve()] if chosen.against else [])]
    figures = measured(roots, chosen.rounds)
    print(
        "CPU ms".ljust(16),
        "Python",
        "  tools",
        "modules",
        *["  the other checkout"] * len(roots[1:]),
    )
    for step in STEPS:
        line = step.ljust(16)
        for root in roots:
            each = figures[root, step]
            line += f"{1e3 * each['python']:7.0f} {1e3 * each['tools']:7.0f} {each['modules']:7}"
        print(line)


if __name__ == "__main__":
    main()

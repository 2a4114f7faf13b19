"""What `opjit precompile` and `opjit.check_precompiled` cost when all is there, and how well a build uses the CPUs when nothing is.

    python tests/benchmarks/precompile.py

    nothing to do       1,002 entries that are there (334 small op folders, three x86-64 levels), in a fresh process that has imported
                        torch and opjit and declared the ops: each entry's key, and its full verification with SHA-256. Declaring, which
                        runs 334 op.py files, is shown beside it
    opjit.check_precompiled         the proof that the same entries, as a list, are there, by what precompile of the list saw
    16 CUDA entries     four bundled ops for four archs, into an empty store: CPU time of the builders and compilers over wall time and
                        CPUs; needs nvcc, no GPU
    1,002 C entries     the same for the entries of the first line

Each process checks what it was told: that all entries were there, or that all were built. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Row, alone, child, seconds, show

LEVELS = ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
CUDA = ["sm_80", "sm_86", "sm_89", "sm_90"]
OPS = 334
OP_PY = """\
import opjit


@opjit.op("ahead::{name}(Tensor x) -> Tensor")
def {name}(x):
    return x.new_empty(x.shape)
"""
SOURCE = """\
#include "opjit.h"

opjit_status {name}_cpu(const opjit_tensor *x, opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + {number}.0f;
    return OPJIT_OK;
}}
"""


def write_ops(root: Path) -> Path:
    for number in range(OPS):
        name = f"add{number}"
        (root / name).mkdir(parents=True)
        (root / name / "op.py").write_text(OP_PY.format(name=name))
        (root / name / f"{name}.c").write_text(SOURCE.format(name=name, number=number))
    return root


def write_list(root: Path) -> str:
    """Write the list that `opjit record` would write of the ops in a folder, for all levels."""
    from opjit.declare import oplist

    flags: dict[str, list[str]] = {kind: [] for kind in oplist.FLAGS}
    uses = [
        oplist.RecordedOp(
            f"ahead::{each.name}",
            f"ahead::{each.name}(Tensor x) -> Tensor",
            "cpu",
            level,
            "",
            flags,
            str(each),
        )
        for each in root.iterdir()
        for level in LEVELS
    ]
    path = root.with_name("ops.json")
    path.write_text(oplist.dump_list(uses))
    return str(path)


def run_once(names: list[str], archs: list[str], listed: str | None = None) -> dict[str, Any]:
    """In a fresh process: declare, precompile, and say how long each took, and how much CPU time the children used; or ready a list."""
    import torch  # noqa: F401

    import opjit
    from opjit.builder import budget
    from opjit.catalog import arguments

    start = time.perf_counter()
    ops = [op.qualified for name in names for op in arguments.ops(name)]
    declared = time.perf_counter()
    before = os.times()
    own = time.process_time()
    if listed is not None:
        there = opjit.check_precompiled(listed)
        return {
            "ready": time.perf_counter() - declared,
            "own": time.process_time() - own,
            "built": 0,
            "there": there,
        }
    report = opjit.precompile(ops, archs)
    took = time.perf_counter() - declared
    own = time.process_time() - own
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {
        "declare": declared - start,
        "precompile": took,
        "built": len(report.built),
        "there": len(report.there),
        "cpu": used,
        "own": own,
        "cpus": budget.cpus(),
    }


def expect(result: dict[str, Any], built: int, there: int) -> dict[str, Any]:
    if (result["built"], result["there"]) != (built, there):
        sys.exit(
            f"expected {built} built and {there} there, got {result['built']} and {result['there']}"
        )
    return result


def use(what: str, result: dict[str, Any], at_least: float | None = None) -> Row:
    """CPU time of the children over wall time and CPUs."""
    share = result["cpu"] / (result["precompile"] * result["cpus"])
    return Row(
        f"{what}, on {result['cpus']} CPUs",
        seconds(result["precompile"]),
        f"{seconds(result['cpu'])} CPU",
        f"{share:.0%}",
        "" if at_least is None else f">= {at_least:.0%}",
        "" if at_least is None else "PASS" if share >= at_least else "FAIL",
    )


def measure(rounds: int) -> list[Row]:
    from opjit.recipe import toolchain

    script = Path(__file__).resolve()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        env = {"OPJIT_CACHE": f"{folder}/cache"}
        if toolchain.find_nvcc(None):
            ops = ["allreduce", "add_custom", "round_ste", "tensor_negate"]
            rows.append(
                use(
                    "16 CUDA entries built",
                    expect(child(script, "--child", ",".join(ops), ",".join(CUDA), env=env), 16, 0),
                    0.85,
                )
            )
        ops_folder = str(write_ops(Path(folder) / "ops"))
        count = OPS * len(LEVELS)
        built = expect(child(script, "--child", ops_folder, ",".join(LEVELS), env=env), count, 0)
        rows.append(use(f"{count} C entries built", built))
        idle = [
            expect(child(script, "--child", ops_folder, ",".join(LEVELS), env=env), 0, count)
            for _ in range(rounds)
        ]
        rows.append(
            alone(
                f"nothing to do over {count} entries",
                [result["precompile"] for result in idle],
                0.5,
            )
        )
        rows.append(
            alone(
                "  its CPU time, which says more on a busy machine",
                [result["own"] for result in idle],
            )
        )
        told = ["--child", ops_folder, "", "--ready", write_list(Path(ops_folder))]
        subprocess.run(
            [sys.executable, "-m", "opjit", "precompile", "--from", told[-1]],
            env={**os.environ, **env},
            check=True,
        )
        ready = [expect(child(script, *told, env=env), 0, count) for _ in range(rounds)]
        rows.append(
            alone(
                f"opjit.check_precompiled over {count} entries",
                [result["ready"] for result in ready],
                0.1,
            )
        )
        rows.append(alone("  its CPU time", [result["own"] for result in ready], 0.05))
        rows.append(alone(f"declaring their {OPS} ops", [result["declare"] for result in idle]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="fresh processes that have nothing to do"
    )
    parser.add_argument("--child", nargs=2, metavar=("OPS", "ARCHS"), help=argparse.SUPPRESS)
    parser.add_argument("--ready", metavar="LIST", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        names, archs = (text.split(",") for text in arguments.child)
        print(json.dumps(run_once(names, archs, arguments.ready)))
        return
    show("Building ahead", measure(arguments.rounds))


if __name__ == "__main__":
    main()

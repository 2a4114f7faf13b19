"""What the first use of each bundled op costs: a fresh process, nothing cached.

    python tests/benchmarks/cold_ops.py              every op, on each backend that it has a source for
    python tests/benchmarks/cold_ops.py allreduce    one op

The clock starts after `import torch` (on a GPU after the CUDA context was made) and stops when the op can be called: the
imports of opjit and of torch's builder, the compilers and the linker, verification, dlopen and registration. Where there is
no GPU, CUDA ops are built for sm_90 and not loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from common import Row, alone, child, show

BARS = {"cpu": 0.5, "cuda": 2.5}
ARCH = "sm_90"


def build(name: str, device: str) -> float:
    """In the fresh process: seconds until the op is there."""
    here = device == "cpu" or torch.cuda.is_available()
    if here:
        torch.zeros(1, device=device)
    start = perf_counter()
    import opjit

    if here:
        opjit.get(name, device)
    else:
        from opjit import backends, request
        from opjit.backends import targets
        from opjit.catalog import registry
        from opjit.recipe import toolchain

        target = targets.named(
            ARCH, backends.for_device(device), toolchain.require_nvcc(None).version
        )
        request.entry(registry.find(name), target)
    return perf_counter() - start


def measure(names: list[str], rounds: int) -> list[Row]:
    from opjit.catalog import registry
    from opjit.recipe import toolchain

    rows = []
    for op in map(registry.find, names) if names else registry.all_ops():
        for device in op.backends():
            if device == "cuda" and toolchain.find_nvcc(None) is None:
                continue
            times = []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as cache:
                    times.append(
                        child(
                            Path(__file__),
                            "--child",
                            device,
                            op.qualified,
                            env={"OPJIT_CACHE": cache},
                        )["seconds"]
                    )
            arch = "" if device == "cpu" or torch.cuda.is_available() else f" (built for {ARCH})"
            rows.append(alone(f"{op.qualified} on {device}{arch}", times, BARS.get(device)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({"seconds": build(options.ops[0], options.child)}))
        return
    os.environ.pop("OPJIT_ARCH", None)
    show("A cold get of each op in a fresh process (medians)", measure(options.ops, options.rounds))


if __name__ == "__main__":
    main()

"""What opjit costs when the binary is there already.

    python tests/benchmarks/warm.py

    import opjit        beyond `import torch`, in a fresh process
    warm get            beyond both imports, in the same fresh process: declaration, key, look-up, verification, dlopen
                        and registration; on a GPU also for the CUDA kernel, after the CUDA context was made
    get again           the look-up in a process that has the op, with timeit

The first process fills an empty cache and is not counted; each of the others checks one sum after its clock stopped.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import timeit
from pathlib import Path

import torch
from common import Row, alone, child, show

NUMBER = 100_000


def fresh(cache: str, device: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the import and of the get, in `rounds` processes."""
    script = Path(__file__).with_name("warm_child.py")
    env = {"OPJIT_CACHE": cache}
    child(script, device, env=env)
    results = [child(script, device, env=env) for _ in range(rounds)]
    return [result["import"] for result in results], [result["get"] for result in results]


def again(cache: str) -> list[float]:
    """Seconds of one get of an op that the process has."""
    os.environ["OPJIT_CACHE"] = cache
    import opjit

    opjit.get("allreduce", "cpu")
    spent = timeit.repeat(
        'get("allreduce", "cpu")', globals={"get": opjit.get}, repeat=21, number=NUMBER
    )
    return [total / NUMBER for total in spent]


def measure(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as cache:
        imports, gets = fresh(cache, "cpu", rounds)
        rows = [
            alone("import opjit, beyond import torch", imports, 15e-3),
            alone("warm get of a C op in a fresh process", gets, 4e-3),
        ]
        if torch.cuda.is_available():
            rows.append(
                alone(
                    "warm get of a CUDA op in a fresh process",
                    fresh(cache, "cuda", rounds)[1],
                    4e-3,
                )
            )
        rows.append(alone("get again", again(cache), 200e-9))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21, help="fresh processes")
    rows = measure(parser.parse_args().rounds)
    show("Imports and gets when nothing is to be built (medians)", rows)


if __name__ == "__main__":
    main()

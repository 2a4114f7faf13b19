"""Hot reloads under fire: an op's source is edited and reloaded while four threads call it without a pause.

    python tests/benchmarks/reload.py [--reloads 1000]

Version n of the op adds n. Each result must be that of one version, all through, and of one that was in place between the call's
start and its end: from the moment that a reload has returned, no call may run older code. Every reload is a build of its own, and
its library stays mapped; the growth of the process's memory and mappings includes that. A notebook cell that runs again does the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from common import Row, alone, seconds, show

THREADS = 4
NUMEL = 4096
OP_PY = """
import torch
import opjit


@opjit.op("reloaded::add(Tensor x) -> Tensor")
def add(x):
    return torch.empty_like(x)
"""
SOURCE = """
#include "opjit.h"

opjit_status add_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "add takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + VERSION;
    return OPJIT_OK;
}
"""


class Caller(threading.Thread):
    """Calls the op until it is told to stop.

    Attributes:
        bounds: the versions that may run now: the last one that is in place for certain, and the newest that may be.
        calls: how many were made, each of them checked.
        wrong: what the first wrong result was.
    """

    def __init__(self, bounds: list[int]) -> None:
        super().__init__(daemon=True)
        self.bounds = bounds
        self.stopped = threading.Event()
        self.calls = 0
        self.wrong: str | None = None

    def run(self) -> None:
        add = torch.ops.reloaded.add.default
        x = torch.zeros(NUMEL)
        while self.wrong is None and not self.stopped.is_set():
            oldest = self.bounds[0]
            try:
                y = add(x)
                least = int(y.min())
                most = int(y.max())
            except Exception as error:
                self.wrong = f"{type(error).__name__}: {error}"
                break
            if least != most or not oldest <= least <= self.bounds[1]:
                self.wrong = f"values from {least} to {most}, where versions {oldest} to {self.bounds[1]} were possible"
            self.calls += 1


def mappings() -> int:
    """Memory mappings of this process, of which Linux allows 65,530."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def reload_under_fire(
    folder: Path, reloads: int, warm_up: int = 20
) -> tuple[list[float], list[Caller], list[int], int]:
    """Seconds of each reload after the first ones, the threads, the bytes that the process grew by in each, and its new mappings."""
    import opjit

    (folder / "op.py").write_text(OP_PY)
    (folder / "add.c").write_text(f"#define VERSION {0}\n{SOURCE}")
    opjit.add_path(folder)
    add = opjit.get("reloaded::add", "cpu")
    bounds = [0, 0]
    callers = [Caller(bounds) for _ in range(THREADS)]
    for caller in callers:
        caller.start()
    spent = []
    sizes = [resident()]
    mapped = 0
    for version in range(1, warm_up + reloads + 1):
        (folder / "add.c").write_text(f"#define VERSION {version}\n{SOURCE}")
        bounds[1] = version
        start = perf_counter()
        if opjit.reload("reloaded::add", "cpu") is not add:
            sys.exit("a reload without a change of the schema gave another overload")
        spent.append(perf_counter() - start)
        bounds[0] = version
        sizes.append(resident())
        if version == warm_up:
            mapped = mappings()
    mapped = mappings() - mapped
    for caller in callers:
        caller.stopped.set()
        caller.join()
    grown = [after - before for before, after in pairwise(sizes)]
    return spent[warm_up:], callers, grown[warm_up:], mapped


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reloads", type=int, default=1000)
    reloads = parser.parse_args().reloads
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["OPJIT_CACHE"] = f"{scratch}/cache"
        folder = Path(scratch, "add")
        folder.mkdir()
        spent, callers, grown, mapped = reload_under_fire(folder, reloads)
    wrong = [caller.wrong for caller in callers if caller.wrong]
    calls = sum(caller.calls for caller in callers)
    mib = sum(grown) / 2**20
    rows = [
        alone("one reload, build included", spent),
        Row("wrong results", f"of {calls}", "", f"{len(wrong)}", "0", "FAIL" if wrong else "PASS"),
        Row(
            "memory",
            f"{mib * 1024 / reloads:.1f} KiB each",
            "",
            f"{mib:.1f} MiB",
            "64 MiB",
            "PASS" if mib < 64 else "FAIL",
        ),
        Row("memory mappings", f"{mapped / reloads:.1f} each", "", f"{mapped}", "", ""),
    ]
    show(
        f"{reloads} reloads while {THREADS} threads call the op ({seconds(sum(spent))}; median {seconds(median(spent))})",
        rows,
    )
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()

"""The resource usage of CUDA kernels, which ptxas, inside nvcc and NVRTC, prints with -v."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from opjit.recipe import compilers

if TYPE_CHECKING:
    from rich.table import Table

_ENTRY = r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'"
_PROPERTIES = r"Function properties for (\w+)"
_STACK = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
_USED = r"Used (\d+) registers(?:.*?(\d+) bytes smem)?"


class KernelUsage(NamedTuple):
    """A kernel for an arch.

    Sizes are in bytes; the shared memory is the part that the kernel declares, without the part
    that a launch adds.
    """

    kernel: str
    arch: str
    registers: int
    shared: int
    stack: int
    spilled: int


def parse(output: str) -> list[KernelUsage]:
    """Return the usage of each kernel in ptxas's output, in its order."""
    found = list(_entries(output))
    names = (
        compilers.run_compiler(
            ["c++filt", "--no-params", *(usage.kernel for usage in found)]
        ).stdout.splitlines()
        if found
        else []
    )
    return [
        usage._replace(kernel=re.sub(r"_INTERNAL_\w+::|\(anonymous namespace\)::|^void ", "", name))
        for usage, name in zip(found, names, strict=True)
    ]


def _entries(output: str) -> Iterator[KernelUsage]:
    """Yield each kernel's usage, by its symbol. ptxas also prints the properties of the
    functions that a kernel calls.
    """
    symbol = ""
    arch = ""
    of = ""
    stack = spilled = 0
    for line in output.splitlines():
        if entry := re.search(_ENTRY, line):
            symbol = entry["symbol"]
            arch = entry["arch"]
        elif properties := re.search(_PROPERTIES, line):
            of = properties[1]
        elif (sizes := re.search(_STACK, line)) and of == symbol:
            stack = int(sizes[1])
            spilled = int(sizes[2]) + int(sizes[3])
        elif (used := re.search(_USED, line)) and symbol:
            yield KernelUsage(symbol, arch, int(used[1]), int(used[2] or 0), stack, spilled)
            symbol = ""
            stack = 0
            spilled = 0


def table(usages: Iterable[KernelUsage]) -> Table:
    """Return a table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    found.add_column("kernel", overflow="fold")
    found.add_column("arch", no_wrap=True)
    for heading in ("regs", "smem", "stack", "spill"):
        found.add_column(heading, justify="right", no_wrap=True)
    for each in sorted(usages):
        found.add_row(*map(str, each))
    return found

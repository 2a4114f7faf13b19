"""What each CUDA kernel takes of a GPU: registers, shared memory, stack, spills, and the occupancy that they allow.

ptxas, inside nvcc and NVRTC, prints the first four with -v.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from opjit.recipe import toolchain

if TYPE_CHECKING:
    from rich.table import Table

THREADS = (128, 256, 512, 1024)  # of a block, for the occupancy
_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\w+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_REGISTERS, _REGISTER_UNIT, _WARP_UNIT = 65536, 256, 4  # of a multiprocessor; a warp's are allocated in units, and warps in fours
_RESERVED, _SHARED_UNIT = 1024, 128  # bytes of shared memory, for each block


class _MultiprocessorLimits(NamedTuple):
    """A multiprocessor's limits: warps, blocks, and bytes of shared memory."""

    warps: int
    blocks: int
    shared: int


# CUDA C++ Programming Guide, technical specifications per compute capability.
_LIMITS = {arch: _MultiprocessorLimits(warps, blocks, shared << 10) for arch, warps, blocks, shared in (
    ("80", 64, 32, 164), ("86", 48, 16, 100), ("87", 48, 16, 164), ("89", 48, 24, 100), ("90", 64, 32, 228), ("100", 64, 32, 228),
    ("103", 64, 32, 228), ("120", 48, 24, 100), ("121", 48, 24, 100))}


class KernelUsage(NamedTuple):
    """A kernel for an arch. Sizes are in bytes; the shared memory is what the kernel declares, without what a launch adds."""

    kernel: str
    arch: str
    registers: int
    shared: int
    stack: int
    spilled: int

    def occupancy(self, threads: int) -> float | None:
        """The share of a multiprocessor's warps that can be resident in blocks of that size; None if the arch's limits are not known."""
        limits = _LIMITS.get(self.arch.removeprefix("sm_").rstrip("af"))
        if limits is None:
            return None
        warps = -(-threads // 32)
        by_registers = _REGISTERS // _up(max(self.registers, 1) * 32, _REGISTER_UNIT) // _WARP_UNIT * _WARP_UNIT
        by_shared = limits.shared // _up(self.shared + _RESERVED, _SHARED_UNIT)
        return min(limits.blocks, limits.warps // warps, by_registers // warps, by_shared) * warps / limits.warps


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def parse(output: str) -> list[KernelUsage]:
    """Return the usage of each kernel in ptxas's output, in its order."""
    found = list(_entries(output))
    symbols = [symbol for symbol, _ in found]
    names = toolchain.run(["c++filt", "--no-params", *symbols]).stdout.splitlines() if symbols else []
    return [usage._replace(kernel=re.sub(r"_INTERNAL_\w+::|\(anonymous namespace\)::|^void ", "", name))
            for (_, usage), name in zip(found, names, strict=True)]


def _entries(output: str) -> Iterator[tuple[str, KernelUsage]]:
    """Yield each kernel's symbol and usage. ptxas prints the properties of the functions that a kernel calls, too."""
    symbol, arch, of = "", "", ""
    stack = spilled = 0
    for line in output.splitlines():
        if entry := _ENTRY.search(line):
            symbol, arch = entry["symbol"], entry["arch"]
        elif properties := _PROPERTIES.search(line):
            of = properties[1]
        elif (sizes := _STACK.search(line)) and of == symbol:
            stack, spilled = int(sizes[1]), int(sizes[2]) + int(sizes[3])
        elif (used := _USED.search(line)) and symbol:
            yield symbol, KernelUsage(symbol, arch, int(used[1]), int(used[2] or 0), stack, spilled)
            symbol, stack, spilled = "", 0, 0


def tables(usages: Sequence[KernelUsage]) -> list[Table]:
    """Return a table for each arch, for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = []
    for arch in dict.fromkeys(each.arch for each in usages):
        one = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=arch, title_justify="left")
        one.add_column("kernel", overflow="fold")
        for heading in ("regs", "smem", "stack", "spill", *(f"at {threads}" for threads in THREADS)):
            one.add_column(heading, justify="right", no_wrap=True)
        for each in sorted(each for each in usages if each.arch == arch):
            shares = (each.occupancy(threads) for threads in THREADS)
            one.add_row(each.kernel, *map(str, (each.registers, each.shared, each.stack, each.spilled)),
                        *("?" if share is None else f"{share:.0%}" for share in shares))
        found.append(one)
    return found

"""What the benchmarks share: tables with bars, medians, fresh processes and the C++ peers' builder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
DTYPES = (  # that torch adds, without complex ones
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


class Row(NamedTuple):
    """One line of a table: two measured times, what follows from them, and the bar it is held against."""

    what: str
    ours: str
    peer: str
    measured: str
    bar: str
    verdict: str


def ratio(
    what: str, ours: Sequence[float], peer: Sequence[float], at_most: float | None = None
) -> Row:
    """Medians of two series of seconds, and the first over the second."""
    mine = median(ours)
    theirs = median(peer)
    found = mine / theirs
    bar = "" if at_most is None else _ratio(at_most)
    return Row(what, seconds(mine), seconds(theirs), _ratio(found), bar, _verdict(found, at_most))


def difference(
    what: str, ours: Sequence[float], peer: Sequence[float], at_most: float | None = None
) -> Row:
    """Medians of two series of seconds, and by how much the first is longer."""
    mine = median(ours)
    theirs = median(peer)
    found = mine - theirs
    bar = "" if at_most is None else f"+{seconds(at_most)}"
    return Row(
        what,
        seconds(mine),
        seconds(theirs),
        f"{'+' if found >= 0 else ''}{seconds(found)}",
        bar,
        _verdict(found, at_most),
    )


def alone(what: str, ours: Sequence[float], at_most: float | None = None) -> Row:
    """The median of one series of seconds."""
    found = median(ours)
    return Row(
        what,
        seconds(found),
        "",
        seconds(found),
        "" if at_most is None else seconds(at_most),
        _verdict(found, at_most),
    )


def _verdict(found: float, at_most: float | None) -> str:
    return "" if at_most is None else "PASS" if found <= at_most else "FAIL"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value >= 0.4 else f"1/{1 / value:.3g}"


def seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.0f} ns"


def show(title: str, rows: Iterable[Row], sides: tuple[str, str] = ("opjit", "peer")) -> None:
    """Print a table in plain text."""
    lines = [Row("", *sides, "measured", "bar", ""), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(Row._fields))]
    print(
        f"\n{title}\ntorch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs\n"
    )
    for line in lines:
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join((line.what.ljust(widths[0]), *numbers)).rstrip())


def path_with_tools() -> str:
    """PATH with the folder of this Python in front."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


def child(script: Path, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a script in a fresh process and read the JSON object on its last line.

    The folder of this Python comes first on PATH: the C++ sides need its ninja, also where no environment is activated.
    Byte code is kept, whatever the environment says: an installed package has it, and making it takes 10 ms.
    """
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PATH": path_with_tools(), "PYTHONDONTWRITEBYTECODE": "", **(env or {})},
    )
    if done.returncode != 0:
        sys.exit(
            f"{script.name} {' '.join(arguments)} failed with exit code {done.returncode}; its message is above"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def load_peer(sources: Sequence[str], build_directory: str) -> None:
    """Build and load a C++ peer as the tutorial does; its ops are in torch.ops.peer."""
    from torch.utils.cpp_extension import load

    load(
        name="peer",
        sources=[str(PEERS / source) for source in sources],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3"],
        build_directory=build_directory,
        is_python_module=False,
    )

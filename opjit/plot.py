"""``opjit bench --plot``: what was measured, as a picture. matplotlib is imported here only."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from opjit.errors import ToolMissing

if TYPE_CHECKING:
    from opjit.bench import Line


def require() -> None:
    """
    Raises:
        ToolMissing: there is no matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise ToolMissing("matplotlib", "--plot needs matplotlib, which is not installed: pip install 'opjit[plot]'")


def draw(lines: Sequence[Line], file: Path) -> None:
    """Write a picture with a column for each op and device: the ratio to the reference above, the bandwidth below.

    Raises:
        ToolMissing: there is no matplotlib.
    """
    require()
    from matplotlib.figure import Figure

    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(f"{line.op} on {line.device}", []).append(line)
    figure = Figure(figsize=(max(6.0, 0.22 * len(lines) + 2 * len(groups)), 6), layout="constrained")
    for column, (title, group) in enumerate(groups.items()):
        labels = [line.label for line in group]
        places = range(len(group))
        above, below = (figure.add_subplot(2, len(groups), 1 + column + row * len(groups)) for row in range(2))
        above.set_title(title)
        above.bar(places, [line.ratio for line in group])
        above.axhline(1.0, color="black", linewidth=0.8)
        above.set_ylabel("time / reference's time")
        above.set_xticks(places, [""] * len(group))
        for name, seconds in (("opjit", [line.opjit for line in group]), ("reference", [line.reference for line in group])):
            rates = [line.bytes / each / 1e9 if line.bytes else float("nan") for line, each in zip(group, seconds, strict=True)]
            below.plot(places, rates, marker=".", label=name)
        below.set_ylabel("GB/s")
        below.set_xticks(places, labels, rotation=90)
        below.legend()
    figure.savefig(file, format="png", dpi=120)

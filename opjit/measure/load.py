"""The load of a machine, on which other programs make measured times too long. Without torch, which takes seconds to import."""

import os


def busy_note() -> str | None:
    """Return a line about a machine that had more to run than it has CPUs during the last minute; None for any other machine."""
    load = os.getloadavg()[0]
    cpus = os.cpu_count() or 1
    if load <= cpus:
        return None
    return (
        f"the machine is busy: load {load:.1f} on {cpus} CPUs, so times and ratios are unreliable"
    )

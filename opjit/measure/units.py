"""Times, rates and the load of the machine as people read them. Without torch, which takes seconds to import."""

import os


def format_time(seconds: float) -> str:
    """Format seconds with three digits and a unit: ``"0.625 s"``, ``"25.4 ms"``, ``"1.39 us"``."""
    if seconds >= 0.5:
        return f"{_three_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{_three_digits(1e3 * seconds)} ms"
    return f"{_three_digits(1e6 * seconds)} us"


def _three_digits(value: float) -> str:
    places = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{places}f}"


def format_rate(rate: float, unit: str) -> str:
    """Format bytes or operations per second with three digits: ``"17.5 GB/s"``, ``"4.12 TB/s"``."""
    if rate >= 1e12:
        return f"{_three_digits(rate / 1e12)} T{unit}/s"
    return f"{_three_digits(rate / 1e9)} G{unit}/s"


def busy_note() -> str | None:
    """Return a line about a machine that had more to run than it has CPUs during the last minute; None for any other machine."""
    load = os.getloadavg()[0]
    cpus = os.cpu_count() or 1
    if load <= cpus:
        return None
    return (
        f"the machine is busy: load {load:.1f} on {cpus} CPUs, so times and ratios are unreliable"
    )

"""Times and rates as people read them. Imports no torch."""


def format_time(seconds: float) -> str:
    """Format seconds with three digits and a unit: ``"0.625 s"``, ``"25.4 ms"``, ``"1.39 us"``."""
    unit, value = (
        ("s", seconds)
        if seconds >= 0.5
        else ("ms", 1e3 * seconds)
        if seconds >= 1e-3
        else ("us", 1e6 * seconds)
    )
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def format_rate(rate: float, unit: str) -> str:
    """Format bytes or operations per second with three digits: ``"17.5 GB/s"``, ``"4.12 TB/s"``."""
    prefix, value = ("T", rate / 1e12) if rate >= 1e12 else ("G", rate / 1e9)
    return f"{value:.{2 if prefix == 'T' and value < 10 else 1 if value < 100 else 0}f} {prefix}{unit}/s"

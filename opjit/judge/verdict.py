"""A verdict: one line of JSON, and its JSON schema."""

import dataclasses
import json
from typing import Any, Literal

from opjit import resources

Failure = Literal["wrong", "compile", "crash", "timeout", "cheat", "unavailable"]
Word = Literal["correct", "noisy", "emulated", Failure]
Tier = Literal["device", "op", "python", "emulated"]


@dataclasses.dataclass(eq=False)
class VerdictReached(Exception):
    """A candidate is judged. A worker sends it to the judge, which raises it. A candidate can forge it.

    Attributes:
        word: the verdict.
        message: the reason. Its first line is about the candidate.
        reusable: whether the worker can judge other candidates.
        facts: fields of the verdict. The judge reads them only from a worker that it trusts.
    """

    word: Failure
    message: str
    reusable: bool = False
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judge's result for a candidate.

    Attributes:
        candidate: the name of the candidate, for example its path.
        verdict: ``correct``. ``noisy``: correct, but its timings or the reference's vary too much. ``wrong``: a result differs,
            an input was written, or an error was raised. ``compile``: the text does not build. ``crash``: its process ended.
            ``timeout``: a call or a batch was too slow. ``cheat``: there is evidence of something that no kernel needs. ``emulated``:
            CUDA code that had correct results and no race on the CPU. It did not run on a GPU, so it is not counted as correct.
            ``unavailable``: the machine lacks the device or the compiler, so the candidate was not judged.
        tier: ``device``: no host code of the candidate ran. ``op``: a library in a restricted process. ``python``: Python code in a
            restricted process. ``emulated``: CUDA code that ran on the CPU.
        task: the name of the task.
        message: the reason of the verdict.
        line: the line of the text that the compiler or the emulation named, if any.
        sample: the call that led to the verdict.
        max_error: the largest difference from the reference in any checked result.
        tolerance: the relative and absolute tolerance of that call.
        median_us: the median time of a call, in microseconds.
        reference_us: the median time of a call of the reference, in microseconds.
        spread: half of the distance between the quartiles of the times, relative to the median.
        reference_spread: the same of the reference's times.
        roofline: the reached fraction of the device's peak, if it is known.
        clock_mhz: the clock of the GPU after the timing.
        registers: the registers of the kernel that uses the most.
        spills: the spilled bytes of the kernel that spills the most.
        nondeterministic: True if two calls with the same tensors differed in a bit.
        seconds: the seconds of each stage, by name.
        isolation: the restrictions in force: ``landlock``, ``seccomp``, ``own processes``, ``frozen results``,
            ``no host code``.
        key: the cache key of its binary.
        cached: True if its binary was in the cache, or if its verdict was known to this `Judge`.
    """

    candidate: str
    verdict: Word
    tier: Tier
    task: str
    message: str = ""
    line: int | None = None
    sample: str | None = None
    max_error: float | None = None
    tolerance: list[float] | None = None
    median_us: float | None = None
    reference_us: float | None = None
    spread: float | None = None
    reference_spread: float | None = None
    roofline: float | None = None
    clock_mhz: int | None = None
    registers: int | None = None
    spills: int | None = None
    nondeterministic: bool = False
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    isolation: list[str] = dataclasses.field(default_factory=list)
    key: str | None = None
    cached: bool = False

    def json(self) -> str:
        """Return the verdict as a line of JSON. Infinity and NaN become null."""
        plain = json.loads(
            json.dumps(dataclasses.asdict(self)),
            parse_constant=lambda _: None,  # infinity and NaN
            parse_float=lambda digits: round(float(digits), 9),
        )
        return json.dumps(plain)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a verdict.

    Example:
        >>> schema()["properties"]["verdict"]["enum"][0]
        'correct'
    """
    return json.loads(resources.template("judge/verdict.schema.json"))  # type: ignore[no-any-return]

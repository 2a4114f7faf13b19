"""A verdict: one line of JSON, and the schema of it."""

import dataclasses
import json
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

Word = Literal["correct", "wrong", "compile", "crash", "timeout", "cheat", "noisy"]
Tier = Literal["device", "op", "python", ""]


class Ended(Exception):
    """A candidate is judged. Reusable: its process may judge others."""

    def __init__(
        self, word: Word, message: str, facts: dict[str, Any] | None = None, reusable: bool = False
    ) -> None:
        super().__init__(message)
        self.word, self.message, self.facts, self.reusable = word, message, facts or {}, reusable


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a candidate is.

    Attributes:
        candidate: its name, such as its path.
        verdict: ``correct``; ``wrong``, for results or an error; ``compile``, for text that does not build; ``crash``; ``timeout``;
            ``cheat``; ``noisy``, for a right one whose time the machine did not tell.
        tier: ``device``: no host code of it ran. ``op``: a library in a process without rights. ``python``: cooperative.
        task: the name of what it was judged by.
        message: the reason.
        line: of its text, if the compiler named one.
        sample: the call that showed it.
        max_error: the largest difference from the reference in any checked result.
        tolerance: the relative and absolute tolerance of that call.
        median_us, reference_us: microseconds of a timed call, by the judge's clock; on CUDA the device's.
        spread: half of the distance between the quartiles, relative to the median.
        roofline: the reached part of what the device can do, where that is known.
        clock_mhz: of the GPU after timing.
        registers, spills: of the kernel that takes most; spills in bytes.
        nondeterministic: whether two calls with the same tensors differed in a bit.
        seconds: of each stage.
        isolation: what held it: ``landlock``, ``seccomp``, ``own processes``, ``no host code``.
        key: of its binary in the cache.
        cached: whether its binary, or in a `Judge` its verdict, was known.
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
        """The verdict as a line of JSON. A number that JSON has not is null."""

        def plain(value: Any) -> Any:
            if isinstance(value, float):
                return round(value, 9) if math.isfinite(value) else None
            if isinstance(value, (list, tuple)):
                return [plain(each) for each in value]
            return (
                {name: plain(each) for name, each in value.items()}
                if isinstance(value, dict)
                else value
            )

        return json.dumps(plain(dataclasses.asdict(self)))


def schema() -> dict[str, Any]:
    """The JSON schema of a verdict.

    Example:
        >>> schema()["properties"]["verdict"]["enum"][0]
        'correct'
    """
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}

    def of(hint: Any) -> dict[str, Any]:
        if hint in kinds:
            return {"type": kinds[hint]}
        if get_origin(hint) is Literal:
            return {"enum": list(get_args(hint))}
        if get_origin(hint) is list:
            return {"type": "array", "items": of(get_args(hint)[0])}
        if get_origin(hint) is dict:
            return {"type": "object", "additionalProperties": of(get_args(hint)[1])}
        return {"anyOf": [of(each) for each in get_args(hint)]}

    hints = get_type_hints(Verdict)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Verdict",
        "type": "object",
        "properties": {field.name: of(hints[field.name]) for field in dataclasses.fields(Verdict)},
        "required": [field.name for field in dataclasses.fields(Verdict)],
        "additionalProperties": False,
    }

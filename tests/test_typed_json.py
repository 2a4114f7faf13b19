"""Records from JSON that anybody may have written."""

from typing import Any, Literal, NamedTuple

import pytest

from opjit.typed_json import typed


class Point(NamedTuple):
    x: int
    label: str | None = None


class Shape(NamedTuple):
    kind: Literal["open", "closed"]
    points: tuple[Point, ...]
    flags: dict[str, list[str]]
    more: Any = None


def test_a_value_becomes_the_record_that_its_type_names() -> None:
    value = {"kind": "open", "points": [{"x": 1}, {"x": 2, "label": "b"}], "flags": {"c": ["-O2"]}}
    expected = Shape("open", (Point(1), Point(2, "b")), {"c": ["-O2"]})
    assert typed(value, Shape) == expected


@pytest.mark.parametrize(
    ("value", "hint", "reason"),
    [
        pytest.param(10**400, float, "expected float, got '1000", id="huge"),
        (True, int, "expected int, got 'True'"),
        (1, str | None, r"expected str \| None, got '1'"),
        ("half", Literal["open"], "expected .*Literal.*, got 'half'"),
        ([1, "2"], list[int], "expected int, got '2'"),
        ({"x": "1"}, Point, "x: expected int, got '1'"),
        ({}, Point, "missing a required argument: 'x'"),
        ({"x": 1, "y": 2}, Point, "unexpected keyword argument 'y'"),
        ([1], Point, "expected Point, got"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_reason(
    value: object, hint: Any, reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        typed(value, hint)

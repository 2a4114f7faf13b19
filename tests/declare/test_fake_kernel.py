"""A fake kernel's mistakes are errors with its line: of its signature at the declaration, of its results when torch traces a call."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit.errors import DeclarationError

_number = iter(range(1000))
HERE = rf"{re.escape(__file__)}:\d+: the fake kernel of inline::fakes\d+ "


def declare(signature: str, fake: Callable[..., Any]) -> opjit.Op:
    return opjit.inline(f"fakes{next(_number)}{signature}", c="not compiled", fake=fake)


@pytest.mark.parametrize(
    ("signature", "fake", "told"),
    [
        ("(Tensor x, int n) -> Tensor", lambda x: x, r"cannot be called with \(x, n\)"),
        ("(Tensor x) -> Tensor", lambda: None, r"cannot be called with \(x\)"),
        ("(Tensor x, int n=2) -> Tensor", lambda x, n: x, r"cannot be called with \(x\): missing"),
        ("(Tensor x, *, int n) -> Tensor", lambda x, n, /: x, r"cannot be called with \(x, n\)"),
        ("(Tensor x, *, int n=2) -> Tensor", lambda x, *, n: x, r"cannot be called with \(x\)"),
        ("(Tensor x, int n=2) -> Tensor", lambda x, n=3: x, "default n=3, and the schema has 2"),
        ("(Tensor x, *, int n=2) -> Tensor", lambda x, *, n=3: x, "default n=3, and the sch"),
    ],
)
def test_a_signature_that_torch_cannot_call_is_refused_at_the_declaration(
    signature: str, fake: Callable[..., Any], told: str
) -> None:
    with pytest.raises(DeclarationError, match=HERE + ".*" + told):
        declare(signature, fake)


@pytest.mark.parametrize(
    ("signature", "fake"),
    [
        ("(Tensor x, int n=2, *, float a=1) -> Tensor", lambda x, n=2, *, a=1.0: x),
        ("(Tensor x, int[2] n=[1, 2]) -> Tensor", lambda x, n=(1, 2): x),
        ("(Tensor x, *, ScalarType? dtype=None) -> Tensor", lambda *args, **kwargs: args[0]),
        ("(Tensor x, int n=2) -> Tensor", lambda x, *others: x),
        ("(Tensor x, *, ScalarType d=float) -> Tensor", lambda x, *, d=torch.float32: x),
    ],
)
def test_signatures_that_accept_every_call_are_declared(
    signature: str, fake: Callable[..., Any]
) -> None:
    declare(signature, fake)


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(3, device="cpu")


@pytest.mark.parametrize(
    ("results", "fake", "told"),
    [
        ("Tensor", lambda x: None, "returned None, and the op has Tensor as result 1"),
        ("Tensor", lambda x: (x, x), "returned a tuple of 2, and the op has Tensor"),
        ("(Tensor, Tensor)", lambda x: x, "returned a value of type Tensor, and the op returns 2"),
        ("(Tensor, Tensor)", lambda x: (x,), "returned 1 values, and the op returns 2 values"),
        ("(Tensor, int)", lambda x: (x, 1.5), "type float, and the op has int as result 2"),
        ("Tensor[]", lambda x: x, r"and the op has Tensor\[\] as result 1"),
        ("()", lambda x: x, "returned a value, and the op returns nothing"),
        ("Tensor", elsewhere, "a tensor on cpu, and the op was called with tensors on meta"),
    ],
)
def test_results_that_differ_from_the_schema_are_errors_when_a_call_is_traced(
    results: str, fake: Callable[..., Any], told: str
) -> None:
    op = declare(f"(Tensor x) -> {results}", fake)
    with pytest.raises(DeclarationError, match=HERE + ".*" + told):
        op(torch.empty(2, device="meta"))


def test_results_as_in_the_schema_pass() -> None:
    for results, fake in (
        ("(Tensor?, int, float, bool)", lambda x: (None, x.numel(), 1, True)),
        ("Tensor[]", lambda x: [x.clone(), x.clone()]),
        ("()", lambda x: None),
    ):
        declare(f"(Tensor x) -> {results}", fake)(torch.empty(2, device="meta"))


def test_an_op_without_a_namespace_is_refused_outside_the_bundled_ops(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="expected namespace::name, such as mylib::scale"):

        @opjit.op("scale(Tensor x) -> Tensor")
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x

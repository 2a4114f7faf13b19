"""Ops that return the arguments which they write: in place, and with out=."""

from typing import Any

import pytest
import torch

from opjit import Op
from opjit.catalog import registry
from tests.helpers import Growth, MakeOp
from tests.tensors import COMPILES

pytestmark = pytest.mark.torch

ADD = """
    opjit_status add__cpu(opjit_tensor *x, double a)
    {
        OPJIT_CHECK(a >= 0, "a is negative");
        for (int64_t i = 0; i < x->numel; i++)
            ((float *)x->data)[i] += (float)a;
        return OPJIT_OK;
    }
    """
BOTH = """
    opjit_status both_cpu(const opjit_tensor *x, opjit_tensor *out, opjit_tensor *twice)
    {
        for (int64_t i = 0; i < x->numel; i++) {
            ((float *)out->data)[i] = ((float *)x->data)[i] + 1;
            ((float *)twice->data)[i] = 2 * ((float *)out->data)[i];
        }
        return OPJIT_OK;
    }
    """


@pytest.fixture
def add_(make_op: MakeOp) -> Op:
    return make_op("add_(Tensor(a!) x, float a) -> Tensor(a!)", ADD)


@pytest.fixture
def both(make_op: MakeOp) -> Op:
    return make_op(
        "both(Tensor x, *, Tensor(a!) out, Tensor(b!) twice) -> (Tensor(a!), Tensor(b!))", BOTH
    )


def test_an_op_returns_the_very_tensors_that_it_wrote(add_: Op, both: Op) -> None:
    x = torch.ones(3)
    out = torch.empty(3)
    twice = torch.empty(3)
    version = x._version
    assert add_(x, 2.0) is x
    assert x.tolist() == [3, 3, 3]
    assert x._version > version
    found = both(x, out=out, twice=twice)
    assert found[0] is out
    assert found[1] is twice
    assert (out.tolist(), twice.tolist()) == ([4, 4, 4], [8, 8, 8])


def test_neither_a_call_nor_an_error_leaks(add_: Op, growth: Growth) -> None:
    x = torch.ones(3)

    def fails() -> None:
        with pytest.raises(RuntimeError, match="a is negative"):
            add_(x, -1.0)

    assert growth(lambda: add_(x, 1.0), 2000) < 100_000
    assert growth(fails, 2000) < 100_000


def test_opcheck(add_: Op, both: Op) -> None:
    torch.library.opcheck(add_.overload, (torch.ones(3), 2.0))
    torch.library.opcheck(
        both.overload, (torch.ones(3),), {"out": torch.empty(3), "twice": torch.empty(3)}
    )


@COMPILES
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_sees_what_was_written(
    add_: Op, both: Op, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def result_and_argument(x: torch.Tensor) -> Any:
        y = x.clone()
        return add_(
            y, 2.0
        ) * 2, y  # inductor writes the product over y where it is only told that the op returns it

    def argument_alone(x: torch.Tensor) -> Any:
        y = x.clone()
        add_(y, 2.0)
        return y * 3, y

    def view(x: torch.Tensor) -> Any:
        add_(add_(x[1:], 1.0), 1.0)
        return x + 1

    def outs(x: torch.Tensor) -> Any:
        out = torch.empty_like(x)
        twice = torch.empty_like(x)
        one, _ = both(x, out=out, twice=twice)
        return one + twice, out

    for function in (result_and_argument, argument_alone, view, outs):
        torch._dynamo.reset()
        one = torch.ones(4)
        other = torch.ones(4)
        torch.testing.assert_close(
            torch.compile(function, fullgraph=True, backend=backend)(one), function(other)
        )
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
def test_export(add_: Op) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.clone()
            return add_(y, 2.0) * 2, y

    exported = torch.export.export(Module(), (torch.ones(3),))
    for program in (exported, exported.run_decompositions()):
        torch.testing.assert_close(
            program.module()(torch.ones(3)), (torch.full((3,), 6.0), torch.full((3,), 3.0))
        )


def test_a_gradient_is_refused(add_: Op, both: Op) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        RuntimeError,
        match=r"writes an argument and returns it, so torch cannot differentiate it.*under torch\.no_grad",
    ):
        add_(x * 2, 1.0)
    with pytest.raises(RuntimeError, match="cannot differentiate it"):
        both(x, out=torch.empty(3), twice=torch.empty(3))
    with torch.no_grad():
        add_(x, 1.0)
    assert x.tolist() == [2, 2, 2]


def test_an_op_of_this_name_can_be_declared_anew(add_: Op) -> None:
    form = f"{add_.schema.name}_without_results"
    assert hasattr(getattr(torch.ops, add_.schema.namespace), form)
    registry.remove(add_)
    assert not hasattr(getattr(torch.ops, add_.schema.namespace), form)

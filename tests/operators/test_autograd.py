"""A declared backward gets what torch.library.register_autograd would give it; without one, a derivative is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import opjit
from opjit import Op
from opjit.errors import DeclarationError
from tests.helpers import MakeOp, elementwise

pytestmark = pytest.mark.torch
SCALE = elementwise("scale", "from[i] * (float)(a + (double)b)", "double a, int64_t b, ")


def without_backward(make_op: MakeOp, **given: bool) -> Op:
    return make_op(
        "scale(Tensor x, float a=2.0, *, int b=1) -> Tensor",
        SCALE,
        fake=lambda x, *args, **kwargs: torch.empty_like(x),
        **given,
    )


def differentiable(make_op: MakeOp) -> Op:
    op = without_backward(make_op)

    @op.setup_context
    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1] + keyword_only_inputs["b"]

    @op.backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None

    return op


def test_defaults_that_torch_leaves_out_are_filled_in(make_op: MakeOp) -> None:
    op = without_backward(make_op)
    seen: list[Any] = []

    @op.setup_context
    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        seen.append((inputs[1:], keyword_only_inputs))
        ctx.factor = inputs[1] + keyword_only_inputs["b"]

    @op.backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append(ctx.needs_input_grad)
        return grad * ctx.factor, None

    calls: list[tuple[tuple[float, ...], dict[str, int], float]] = [
        ((), {}, 3.0),
        ((5.0,), {}, 6.0),
        ((), {"b": 7}, 9.0),
        ((5.0,), {"b": 7}, 12.0),
    ]
    for args, kwargs, factor in calls:
        x = torch.ones(2, requires_grad=True)
        y = op(x, *args, **kwargs)
        [gradient] = torch.autograd.grad(y.sum(), x)
        assert y.tolist() == gradient.tolist() == [factor] * 2
        # The flags that torch passes on.
        assert seen == [
            ((args or (2.0,)), {"b": 1, **kwargs}),
            (True, False)[: 1 + len(args)],
        ]
        seen.clear()
    assert not op(torch.ones(2)).requires_grad
    with torch.no_grad():
        assert not op(torch.ones(2, requires_grad=True)).requires_grad
    assert seen == []


def test_with_a_list_a_backward_returns_none_for_what_was_left_out_too(make_op: MakeOp) -> None:
    op = make_op(
        "total(Tensor[] xs, float a=2.0, float? b=None) -> Tensor",
        """
        opjit_status total_cpu(const opjit_tensors *xs, double a, const double *b, opjit_tensor *out)
        {
            float sum = 0;
            OPJIT_TRY(opjit_empty(out, 0, NULL, OPJIT_FLOAT32, &xs->data[0]));
            for (int64_t i = 0; i < xs->len; i++)
                sum += ((const float *)xs->data[i].data)[0];
            ((float *)out->data)[0] = sum * (float)(a + (b ? *b : 0.0));
            return OPJIT_OK;
        }""",
        fake=lambda xs, *args: xs[0].new_empty(()),
    )

    @op.setup_context
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs[0])
        ctx.factor = inputs[1] + (inputs[2] or 0.0)

    @op.backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[list[torch.Tensor], None, None]:
        return [grad.reshape(1) * ctx.factor] * ctx.count, None, None

    calls: list[tuple[tuple[float, ...], float]] = [((), 2.0), ((5.0,), 5.0), ((5.0, 1.0), 6.0)]
    for args, factor in calls:
        x = torch.ones(1, requires_grad=True)
        [gradient] = torch.autograd.grad(op([x, torch.ones(1)], *args), x)
        assert gradient.tolist() == [factor]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp
@pytest.mark.parametrize("named", [True, False], ids=["backward", "no backward"])
def test_forward_mode_is_an_error_and_not_a_tangent_of_zero(make_op: MakeOp, named: bool) -> None:
    op = differentiable(make_op) if named else without_backward(make_op)
    x = torch.ones(3)
    message = rf"{op.qualified} does not support forward mode"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda v: op(v, 4.0), (x,), (x,))
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jacfwd(lambda v: op(v, 4.0))(x)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=message):
            op(forward_ad.make_dual(x, x), 4.0)
        assert op(x, 4.0).tolist() == [5.0] * 3, "it has no tangent"


NO_DERIVATIVE = r"derivative for optest\d+::\w+ is not implemented"


def test_a_backward_through_an_op_without_one_is_an_error(make_op: MakeOp) -> None:
    op = without_backward(make_op)
    x = torch.ones(3, requires_grad=True)
    y = op(x, 4.0)
    assert y.requires_grad
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        y.sum().backward()
    assert x.grad is None
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        torch.func.grad(lambda x: op(x).sum())(x.detach())
    with torch.no_grad():
        assert not op(x).requires_grad
    with torch.inference_mode():
        assert op(x).tolist() == [3.0] * 3
    assert not op(x.detach()).requires_grad


def test_compiled_without_a_backward_an_op_runs_and_has_no_gradient(make_op: MakeOp) -> None:
    op = without_backward(make_op)
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: op(x, 4.0) * 2, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert compiled(x).tolist() == [10.0] * 3
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        compiled(x).sum().backward()
    torch.library.opcheck(op.overload, (x.detach(), 4.0))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # opcheck's own, from torch 2.15 on
def test_declared_not_differentiable_an_op_gives_constants(make_op: MakeOp) -> None:
    op = without_backward(make_op, differentiable=False)
    x = torch.ones(3, requires_grad=True)
    assert not op(x).requires_grad

    def product(x: torch.Tensor) -> Any:
        return op(x) * x

    for call in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        [grad] = torch.autograd.grad(call(x).sum(), x)
        assert grad.tolist() == [3.0] * 3
    torch.library.opcheck(op.overload, (x, 4.0))
    with pytest.raises(DeclarationError, match="differentiable=False"):
        op.backward(lambda ctx, grad: (grad, None))


def test_a_second_declaration_may_change_what_autograd_does() -> None:
    x = torch.ones(3, requires_grad=True)
    for differentiable in (True, False, True):
        op = opjit.inline(
            "twice_declared(Tensor x) -> Tensor",
            c=elementwise("twice_declared", "from[i] * 2.0f"),
            like="x",
            differentiable=differentiable,
        )
        assert op(x).requires_grad is differentiable
    op.backward(lambda ctx, grad: grad * 2)
    [grad] = torch.autograd.grad(op(x).sum(), x)
    assert grad.tolist() == [2.0] * 3


WRITES = """
opjit_status count_cpu(opjit_tensor *x, const opjit_tensor *y, opjit_tensor *out)
{
    ((float *)x->data)[0] += 1;
    OPJIT_TRY(opjit_empty_like(out, y, y->dtype));
    memcpy(out->data, y->data, sizeof(float));
    return OPJIT_OK;
}
"""


@pytest.mark.parametrize("differentiable", [True, False])
def test_an_op_that_writes_an_argument_counts_its_version_up(
    make_op: MakeOp, increment: Op, differentiable: bool
) -> None:
    op = make_op(
        "count(Tensor(a!) x, Tensor y) -> Tensor",
        WRITES,
        fake=lambda x, y: torch.empty_like(y),
        differentiable=differentiable,
    )
    calls: list[Callable[[torch.Tensor], object]] = [
        increment,
        lambda x: op(x, torch.ones(1)),
        lambda x: op(x, torch.ones(1, requires_grad=True)),
    ]
    for call in calls:
        x = torch.ones(1)
        saved = torch.ones(1, requires_grad=True) * x
        before = x._version
        call(x)
        assert x.tolist() == [2.0]
        assert x._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


def test_a_result_of_an_op_that_writes_another_argument_has_no_derivative(make_op: MakeOp) -> None:
    op = make_op(
        "count(Tensor(a!) x, Tensor y) -> Tensor", WRITES, fake=lambda x, y: torch.empty_like(y)
    )
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        op(torch.ones(1), torch.ones(1, requires_grad=True)).backward()


def test_lists_of_an_op_without_a_backward_have_no_derivative_either(make_op: MakeOp) -> None:
    op = make_op(
        "halves(Tensor x) -> Tensor[]",
        """
        opjit_status halves_cpu(const opjit_tensor *x, opjit_outputs *out)
        {
            OPJIT_TRY(opjit_make_outputs(out, 2));
            for (int64_t i = 0; i < 2; i++) {
                OPJIT_TRY(opjit_empty_like(&out->data[i], x, x->dtype));
                ((float *)out->data[i].data)[0] = ((const float *)x->data)[0] / 2;
            }
            return OPJIT_OK;
        }""",
        fake=lambda x: [torch.empty_like(x)] * 2,
    )
    halves = op(torch.ones(1, requires_grad=True))
    assert isinstance(halves, list)
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        (halves[0] + halves[1]).backward()


def test_torch_func_goes_around_an_op_without_a_backward(make_op: MakeOp) -> None:
    op = without_backward(make_op)
    x = torch.ones(3)
    assert torch.func.grad(lambda x: (op(x.detach()) * x).sum())(x).tolist() == [3.0] * 3
    assert torch.vmap(lambda row: op(row, 4.0))(torch.ones(2, 3)).tolist() == [[5.0] * 3] * 2

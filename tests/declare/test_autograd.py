"""A declared backward: setup_context and backward get what torch.library.register_autograd would give them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo.compiled_autograd

from opjit import Op
from opjit.declare import autograd

pytestmark = pytest.mark.torch
SCALE = """
opjit_status scale_cpu(const opjit_tensor *x, double a, int64_t b, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] * (float)(a + (double)b);
    return OPJIT_OK;
}
"""


def scale(make_op: Callable[..., Op]) -> Op:
    return make_op("scale(Tensor x, float a=2.0, *, int b=1) -> Tensor", SCALE, fake=lambda x, *args, **kwargs: torch.empty_like(x))


def differentiable(make_op: Callable[..., Op]) -> Op:
    op = scale(make_op)

    @op.setup_context
    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1] + keyword_only_inputs["b"]

    @op.backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None

    return op


def test_defaults_that_torch_leaves_out_are_filled_in(make_op: Callable[..., Op]) -> None:
    op = scale(make_op)
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
        ((), {}, 3.0), ((5.0,), {}, 6.0), ((), {"b": 7}, 9.0), ((5.0,), {"b": 7}, 12.0)]
    for args, kwargs, factor in calls:
        x = torch.ones(2, requires_grad=True)
        y = op(x, *args, **kwargs)
        y.sum().backward()
        assert y.tolist() == [factor] * 2
        assert x.grad is not None
        assert x.grad.tolist() == [factor] * 2
        assert seen == [((args or (2.0,)), {"b": 1, **kwargs}), (True, False)[:1 + len(args)]]  # of what torch passes on
        seen.clear()
    assert not op(torch.ones(2)).requires_grad
    with torch.no_grad():
        assert not op(torch.ones(2, requires_grad=True)).requires_grad
    assert seen == []


@pytest.mark.parametrize("missing", autograd.PRIVATE)
def test_a_torch_without_the_private_names_gets_the_backward_from_its_own_register_autograd(
        make_op: Callable[..., Op], monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    register = Mock(wraps=torch.library.register_autograd)
    monkeypatch.setattr(torch.library, "register_autograd", register)
    with monkeypatch.context() as hidden:
        hidden.delattr(torch._C, missing)
        op = differentiable(make_op)
    assert register.call_count == 1
    x = torch.ones(2, requires_grad=True)
    calls: list[tuple[tuple[float, ...], dict[str, int], float]] = [((), {}, 3.0), ((5.0,), {"b": 7}, 12.0)]
    for args, kwargs, factor in calls:
        [grad] = torch.autograd.grad(op(x, *args, **kwargs).sum(), x)
        assert grad.tolist() == [factor] * 2
    assert not op(x.detach()).requires_grad


def test_with_a_list_a_backward_returns_none_for_what_was_left_out_too(make_op: Callable[..., Op]) -> None:
    op = make_op("total(Tensor[] xs, float a=2.0, float? b=None) -> Tensor", """
        opjit_status total_cpu(const opjit_tensors *xs, double a, const double *b, opjit_tensor *out)
        {
            float sum = 0;
            OPJIT_TRY(opjit_empty(out, 0, NULL, OPJIT_FLOAT32, &xs->data[0]));
            for (int64_t i = 0; i < xs->len; i++)
                sum += ((const float *)xs->data[i].data)[0];
            ((float *)out->data)[0] = sum * (float)(a + (b ? *b : 0.0));
            return OPJIT_OK;
        }""", fake=lambda xs, *args: xs[0].new_empty(()))

    @op.setup_context
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count, ctx.factor = len(inputs[0]), inputs[1] + (inputs[2] or 0.0)

    @op.backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[list[torch.Tensor], None, None]:
        return [grad.reshape(1) * ctx.factor] * ctx.count, None, None

    calls: list[tuple[tuple[float, ...], float]] = [((), 2.0), ((5.0,), 5.0), ((5.0, 1.0), 6.0)]
    for args, factor in calls:
        x = torch.ones(1, requires_grad=True)
        op([x, torch.ones(1)], *args).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [factor]


def test_threads_do_not_mix_their_calls(make_op: Callable[..., Op]) -> None:
    op = differentiable(make_op)
    wrong: list[int] = []

    def work(b: int) -> None:
        for _ in range(300):
            x = torch.ones(3, requires_grad=True)
            op(x, b=b).sum().backward()
            if x.grad is None or x.grad.tolist() != [2.0 + b] * 3:
                wrong.append(b)

    op(torch.ones(1))
    workers = [threading.Thread(target=work, args=(b,)) for b in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_compiled_autograd_traces_the_backward_of_an_eager_call(make_op: Callable[..., Op]) -> None:
    op = differentiable(make_op)
    x = torch.ones(3, requires_grad=True)
    loss = op(x, 4.0).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0] * 3

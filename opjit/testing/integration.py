"""Checks of an op within torch: opcheck, autograd, torch.compile and torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.declare.op import Op
from opjit.declare.sample import Sample, tensors_of
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import assert_same
from opjit.testing.samples import (
    Skipped,
    assert_same_gradients,
    distinct_samples,
    effects,
    floating,
    needs_backward,
    replica,
    samples,
    with_gradients,
)
from opjit.testing.trials import trials

CHECKS: list[Check] = []
_PATIENCE = 6


@add(CHECKS, "opcheck", _PATIENCE)
def _opcheck(op: Op, device: str) -> str:
    """torch.library.opcheck passes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # opcheck reads it
        calls = [sample.map(replica) for sample in distinct_samples(op, device, 12, _has_arithmetic, "without float8")]
        if op.differentiable:
            calls += [with_gradients(sample) for sample in distinct_samples(op, device, 4, floating, "with floating-point elements")]
        for call in trials(calls):
            torch.library.opcheck(op.overload, call.args, call.kwargs)
    return "schema, fake kernel, autograd, AOT"


def _has_arithmetic(sample: Sample) -> bool:
    """Whether torch can compare copies of the sample's tensors, which opcheck does."""
    return not any(t.dtype.is_floating_point and t.element_size() == 1 for t in sample.tensors())


@add(CHECKS, "gradients", _PATIENCE)
def _gradients(op: Op, device: str) -> str:
    """Gradients equal the reference's."""
    needs_backward(op)
    compared = sum(assert_same_gradients(sample, op.reference_function, op.overload) for sample in trials(samples(op, device)))
    if not compared:
        raise Skipped("the reference is a step function without a gradient; test the op's gradient in a test of its own")
    return tally(compared, "sample")


@add(CHECKS, "gradcheck", _PATIENCE)
def _gradcheck(op: Op, device: str) -> str:
    """torch.autograd.gradcheck passes in float64 wherever it passes for the reference."""
    needs_backward(op)
    checked = 0
    small = distinct_samples(op, device, 8, lambda each: each.numel <= 500 and any(t.dtype == torch.float64 for t in each.tensors()),
                             "with float64 and at most 500 elements")
    for sample in trials(small):
        inputs = sample.map(lambda t: t.detach().clone().requires_grad_(t.dtype == torch.float64))
        values, spec = tree_flatten(inputs.values)
        slopes = any(r.requires_grad for r in tensors_of(op.reference_function(*inputs.args, **inputs.kwargs)))

        def passes(call: Callable[..., Any], fast: bool, complain: bool, spec: Any = spec, values: list[Any] = values) -> bool:
            def rebuilt(*changed: Any) -> Any:
                args, kwargs = tree_unflatten(list(changed), spec)
                return tuple(r for r in tensors_of(call(*args, **kwargs)) if r.requires_grad)

            return torch.autograd.gradcheck(rebuilt, values, fast_mode=fast, raise_exception=complain)

        if slopes and passes(op.reference_function, True, False):
            assert passes(op.overload, sample.numel > 100, True)
            checked += 1
    if not checked:
        raise Skipped("the reference's gradient is not its derivative")
    return tally(checked, "float64 sample")


def _compiled(op: Op, device: str, dynamic: bool | None) -> str:
    calls = distinct_samples(op, device, 4)
    for sample in trials(calls):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, backend="aot_eager", dynamic=dynamic)
        with torch.no_grad():
            assert_same(effects(compiled, op, sample), effects(op.overload, op, sample), sample)
        if op.differentiable:
            assert_same_gradients(sample, op.overload, compiled)
    return f"fullgraph, {tally(len(calls), 'sample')}"


@add(CHECKS, "compile static", _PATIENCE)
def _compile_static(op: Op, device: str) -> str:
    """torch.compile captures the op in one graph, with the same results."""
    return _compiled(op, device, None)


@add(CHECKS, "compile dynamic", _PATIENCE)
def _compile_dynamic(op: Op, device: str) -> str:
    """Compiled with symbolic shapes, the op gives the same results."""
    return _compiled(op, device, True)


class _Call(torch.nn.Module):
    """A module that calls the op; the call's tensors are its inputs."""

    def __init__(self, op: Op, sample: Sample) -> None:
        super().__init__()
        self.overload = op.overload
        self.values, self.spec = tree_flatten(sample.values)

    def forward(self, *tensors: torch.Tensor) -> Any:
        waiting = iter(tensors)
        args, kwargs = tree_unflatten([next(waiting) if isinstance(v, torch.Tensor) else v for v in self.values], self.spec)
        return self.overload(*args, **kwargs)


def _exported(op: Op, device: str, strict: bool) -> str:
    calls = distinct_samples(op, device, 4)
    for sample in trials(calls):
        torch._dynamo.reset()
        program = torch.export.export(_Call(op, sample), tuple(sample.map(replica).tensors()), strict=strict)
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert called.count(op.overload) == 1, f"on ({sample}) the exported graph calls {called}"
        module = program.module()
        assert_same(effects(lambda *args, **kwargs: module(*Sample(args, kwargs).tensors()), op, sample),  # noqa: B023
                    effects(op.overload, op, sample), sample)
    return f"one node, {tally(len(calls), 'sample')}"


@add(CHECKS, "export", _PATIENCE)
def _export(op: Op, device: str) -> str:
    """Exported, the op is one node with the same results."""
    return _exported(op, device, False)


@add(CHECKS, "export strict", _PATIENCE)
def _export_strict(op: Op, device: str) -> str:
    """Exported in strict mode, the op is one node with the same results."""
    return _exported(op, device, True)

"""What torch makes of an op: opcheck, autograd, torch.compile and torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opjit.checks.check import Check, add
from opjit.op import Op
from opjit.samples import (
    Sample,
    Skipped,
    assert_same,
    assert_same_gradients,
    differentiable,
    floating,
    kinds,
    leaves,
    outcome,
    replica,
    samples,
    tensors_of,
)

CHECKS: list[Check] = []


def _needs_backward(op: Op) -> None:
    if not differentiable(op):
        raise Skipped("the op has no backward")


@add(CHECKS, "opcheck")
def _opcheck(op: Op, device: str) -> str:
    """torch.library.opcheck is satisfied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # opcheck looks at it
        for sample in kinds(op, device, 12):
            torch.library.opcheck(op.overload, sample.map(replica).args, sample.map(replica).kwargs)
        if differentiable(op):
            for sample in kinds(op, device, 4, floating):
                args, kwargs = leaves(sample)
                torch.library.opcheck(op.overload, args, kwargs)
    return "schema, fake kernel, autograd, AOT"


@add(CHECKS, "gradients")
def _gradients(op: Op, device: str) -> str:
    """Gradients are the reference's."""
    _needs_backward(op)
    compared = sum(assert_same_gradients(sample, op.plain, op.overload) for sample in samples(op, device))
    if not compared:
        raise Skipped("the reference is a step and has no gradient; the one that the op gives is a test of the op's own")
    return f"{compared} samples"


@add(CHECKS, "gradcheck")
def _gradcheck(op: Op, device: str) -> str:
    """torch.autograd.gradcheck holds in float64 where it holds for the reference."""
    _needs_backward(op)
    checked = 0
    for sample in kinds(op, device, 8, lambda sample: sample.numel <= 500 and any(t.dtype == torch.float64 for t in sample.tensors())):
        inputs = sample.map(lambda t: t.detach().clone().requires_grad_(t.dtype == torch.float64))
        values, spec = tree_flatten(tuple(inputs))
        slopes = any(r.requires_grad for r in tensors_of(op.plain(*inputs.args, **inputs.kwargs)))

        def passes(call: Callable[..., Any], fast: bool, complain: bool, spec: Any = spec, values: list[Any] = values) -> bool:
            def rebuilt(*changed: Any) -> Any:
                args, kwargs = tree_unflatten(list(changed), spec)
                return tuple(r for r in tensors_of(call(*args, **kwargs)) if r.requires_grad)

            return torch.autograd.gradcheck(rebuilt, values, fast_mode=fast, raise_exception=complain)

        if slopes and passes(op.plain, True, False):
            assert passes(op.overload, sample.numel > 100, True)
            checked += 1
    if not checked:
        raise Skipped("the reference's gradient is not its slope")
    return f"{checked} float64 samples"


def _compiled(op: Op, device: str, dynamic: bool | None) -> str:
    calls = kinds(op, device, 4)
    for sample in calls:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), fullgraph=True, backend="aot_eager", dynamic=dynamic)
        with torch.no_grad():
            assert_same(outcome(compiled, op, sample), outcome(op.overload, op, sample), sample)
        if differentiable(op):
            assert_same_gradients(sample, op.overload, compiled)
    return f"fullgraph, {len(calls)} samples"


@add(CHECKS, "compile static")
def _compile_static(op: Op, device: str) -> str:
    """Compiled by torch.compile in one graph it gives the same."""
    return _compiled(op, device, None)


@add(CHECKS, "compile dynamic")
def _compile_dynamic(op: Op, device: str) -> str:
    """Compiled with symbolic shapes it gives the same."""
    return _compiled(op, device, True)


class _Call(torch.nn.Module):
    """A call whose tensors are the module's inputs."""

    def __init__(self, op: Op, sample: Sample) -> None:
        super().__init__()
        self.overload = op.overload
        self.values, self.spec = tree_flatten(tuple(sample))

    def forward(self, *tensors: torch.Tensor) -> Any:
        waiting = iter(tensors)
        args, kwargs = tree_unflatten([next(waiting) if isinstance(v, torch.Tensor) else v for v in self.values], self.spec)
        return self.overload(*args, **kwargs)


def _exported(op: Op, device: str, strict: bool) -> str:
    calls = kinds(op, device, 4)
    for sample in calls:
        torch._dynamo.reset()
        program = torch.export.export(_Call(op, sample), tuple(sample.map(replica).tensors()), strict=strict)
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert called.count(op.overload) == 1, f"on ({sample}) the exported graph calls {called}"
        module = program.module()
        assert_same(outcome(lambda *args, **kwargs: module(*Sample(args, kwargs).tensors()), op, sample),  # noqa: B023
                    outcome(op.overload, op, sample), sample)
    return f"one node, {len(calls)} samples"


@add(CHECKS, "export")
def _export(op: Op, device: str) -> str:
    """Exported it is one node and gives the same."""
    return _exported(op, device, False)


@add(CHECKS, "export strict")
def _export_strict(op: Op, device: str) -> str:
    """Exported in strict mode it is one node and gives the same."""
    return _exported(op, device, True)

"""Checks of an op within torch: opcheck, torch.compile and torch.export."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import assert_same
from opjit.testing.gradients import assert_same_gradients, with_gradients
from opjit.testing.samples import distinct_samples, effects, floating, replica
from opjit.testing.trials import trials

CHECKS: list[Check] = []
_TIMEOUT_FACTOR = 6


@add(CHECKS, "opcheck", _TIMEOUT_FACTOR)
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


class _Call(torch.nn.Module):
    """A module that calls the op."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.overload = op.overload

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)


def _exported(op: Op, device: str, strict: bool) -> str:
    calls = distinct_samples(op, device, 4)
    for sample in trials(calls):
        torch._dynamo.reset()
        own = sample.map(replica)
        program = torch.export.export(_Call(op), own.args, own.kwargs, strict=strict)
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert called.count(op.overload) == 1, f"on ({sample}) the exported graph calls {called}"
        assert_same(effects(program.module(), op, sample), effects(op.overload, op, sample), sample)
    return f"one node, {tally(len(calls), 'sample')}"


CHECKS += [
    Check("compile static", "torch.compile captures the op in one graph, with the same results",
          lambda op, device: _compiled(op, device, dynamic=None), _TIMEOUT_FACTOR),
    Check("compile dynamic", "Compiled with symbolic shapes, the op gives the same results",
          lambda op, device: _compiled(op, device, dynamic=True), _TIMEOUT_FACTOR),
    Check("export", "Exported, the op is one node with the same results",
          lambda op, device: _exported(op, device, strict=False), _TIMEOUT_FACTOR),
    Check("export strict", "Exported in strict mode, the op is one node with the same results",
          lambda op, device: _exported(op, device, strict=True), _TIMEOUT_FACTOR),
]

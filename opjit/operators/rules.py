"""The rules of an op that are registered with torch: for autograd, vmap, autocast, variants,
DTensor and torch's compiler.

torch gets functions that look at the op's declaration when they are called, so that a reload can replace it."""

from collections.abc import Callable
from functools import partial

import torch

from opjit.declare.op_state import OpState
from opjit.operators import autograd, sharding, transforms, variants


def bind_autograd(op: OpState) -> None:
    """Register a new operator's rule for autograd."""
    assert op.library is not None
    op.rules.clear()
    op.has_passthrough = False
    if op.declaration.constant:
        op.library.impl(op.schema.name, torch.library.fallthrough_kernel, "Autograd")
    else:
        op.has_passthrough = autograd.bind_backward(op)


def bind_rules(op: OpState) -> None:
    """Register the rules for vmap, autocast and variants once each, and let DTensor query the
    sharding rule again.
    """
    if op.library is None:
        return
    declaration = op.declaration
    if declaration.vmap is not None or declaration.elementwise:
        _bind_once(op, "vmap", _bind_vmap)
    if declaration.autocast is not None:
        _bind_once(op, "autocast", transforms.bind_autocast)
    if declaration.variants:
        _bind_once(op, "variants", variants.bind_variants)
    forget_sharding(op)


def bind_late(op: OpState) -> None:
    """Register the op's rule with DTensor and its variants with torch's compiler, once each, if
    the process uses them.
    """
    declaration = op.declaration
    if declaration.sharding is not None or declaration.elementwise:
        _bind_once(op, "sharding", sharding.bind_sharding)
    if declaration.variants:
        _bind_once(op, "inductor", variants.feed_inductor)


def forget_sharding(op: OpState) -> None:
    """Unregister the op's rule from DTensor if it is registered."""
    if "sharding" in op.rules:
        sharding.forget_rule(op.overload)
        op.rules.remove("sharding")


def _bind_once(op: OpState, rule: str, bind_rule: Callable[[OpState], bool]) -> None:
    """Register a rule with torch unless it is registered.

    `bind_rule` returns False if that is not possible yet.
    """
    if rule not in op.rules and bind_rule(op):
        op.rules.add(rule)


def _bind_vmap(op: OpState) -> bool:
    torch.library.register_vmap(op.qualified, partial(transforms.run_vmap, op), lib=op.library)
    return True

"""The rules of an op that torch knows: for autograd, vmap, autocast, variants, DTensor and torch's compiler.

torch gets functions that look at the op's declaration when they are called, so that a reload can replace it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opjit.declare.op_state import OpState
from opjit.operators import autograd, sharding, transforms, variants


def bind_autograd(op: OpState) -> None:
    """Tell torch what autograd does with a new operator."""
    assert op.library is not None
    op.rules.clear()
    op.has_passthrough = False
    if op.declaration.constant:
        op.library.impl(op.schema.name, torch.library.fallthrough_kernel, "Autograd")
    else:
        op.has_passthrough = autograd.bind_backward(op)


def bind_rules(op: OpState) -> None:
    """Tell torch the rules for vmap, autocast and variants, each once, and let DTensor ask for the sharding rule again."""
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
    """Tell DTensor the op's rule, and torch's compiler its variants, each once, if the process uses them."""
    declaration = op.declaration
    if declaration.sharding is not None or declaration.elementwise:
        _bind_once(op, "sharding", _bind_sharding)
    if declaration.variants:
        _bind_once(op, "inductor", variants.feed_inductor)


def forget_sharding(op: OpState) -> None:
    """Take the op's rule back from DTensor, if DTensor knows it."""
    if "sharding" in op.rules:
        sharding.forget_rule(op.overload)
        op.rules.remove("sharding")


def _bind_once(op: OpState, rule: str, bind_rule: Callable[[OpState], bool]) -> None:
    """Tell torch a rule that it does not know. `bind_rule` returns False if it cannot yet."""
    if rule not in op.rules and bind_rule(op):
        op.rules.add(rule)


def _bind_vmap(op: OpState) -> bool:
    torch.library.register_vmap(op.qualified, partial(transforms.run_vmap, op), lib=op.library)
    return True


def _bind_sharding(op: OpState) -> bool:
    def rule(*args: Any, **kwargs: Any) -> Any:
        declared = op.declaration.sharding
        if declared is None:
            return sharding.elementwise_rule(op.overload, args)
        return declared(*args, **kwargs)

    return sharding.register_rule(op.overload, rule)

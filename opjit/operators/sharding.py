"""The rule of an op for shards, which torch.distributed.tensor.DTensor uses.

A declaration does not import DTensor, because the import lasts seconds. DTensor calls an op's fake
kernel for the results' sizes before it looks for a rule, and that call registers the rule.
"""

import sys
from typing import Any

from torch._ops import OpOverload

from opjit.declare.op_state import OpState


def bind_sharding(op: OpState) -> bool:
    """Register an op's rule with torch.distributed.tensor.experimental.register_sharding if this
    process uses DTensor.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor.experimental import register_sharding

    def rule(*args: Any, **kwargs: Any) -> Any:
        declared = op.declaration.sharding
        if declared is None:
            return _elementwise_rule(op.overload, args)
        return declared(*args, **kwargs)

    register_sharding(op.overload)(rule)
    return True


def forget_rule(overload: OpOverload) -> None:
    """Unregister the op's rule from DTensor, and clear DTensor's caches of results."""
    from torch.distributed.tensor import DTensor, debug

    DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.pop(overload, None)
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def _elementwise_rule(
    overload: OpOverload, args: tuple[Any, ...]
) -> list[tuple[list[Any], list[Any]]]:
    """Return the rule of an elementwise op: any dimension of the result may be sharded, with the dimensions that it comes from."""
    import torch
    from torch.distributed.tensor import Replicate, Shard

    tensors = {index: value for index, value in enumerate(args) if hasattr(value, "placements")}
    shape = torch.broadcast_shapes(*(value.shape for value in tensors.values()))

    def placed(index: int, dim: int | None) -> Any:
        if index not in tensors:
            return None
        own = tensors[index].shape
        at = -1 if dim is None else dim + len(own) - len(shape)
        return Shard(at) if dim is not None and at >= 0 and own[at] == shape[dim] else Replicate()

    dims = [None, *(dim for dim, size in enumerate(shape) if size != 1)]
    results = len(overload._schema.returns)
    return [
        (
            [Replicate() if dim is None else Shard(dim)] * results,
            [placed(index, dim) for index in range(len(args))],
        )
        for dim in dims
    ]

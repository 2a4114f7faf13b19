"""Which of torch's operators compute something in a block: a candidate that calls those of the reference has no kernel of its own."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operators that make, move or view tensors, and compute nothing.
_FREE = frozenset("""
empty empty_strided empty_like new_empty zeros ones full zeros_like ones_like full_like clone copy copy_ _to_copy to set_ view _unsafe_view
reshape expand permute transpose t unsqueeze squeeze slice select detach alias as_strided unbind split cat stack contiguous item
_local_scalar_dense resize_ fill_ zero_ arange scalar_tensor lift_fresh""".split())  # noqa: SIM905 - a list of words


class Recorder(TorchDispatchMode):
    """Notes the names of torch's own operators that are called in its block, such as ``"mm"``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "aten" and name not in _FREE:
            self.names.add(name)
        return func(*args, **(kwargs or {}))

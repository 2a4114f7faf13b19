"""Tensors among values, and their memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_of(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def bytes_of(values: Any) -> int:
    """Return the bytes of all tensors among values."""
    return sum(each.numel() * each.element_size() for each in tensors_of(values))


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, including the gaps between its elements."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def span(tensor: Tensor) -> int:
    """How many elements the memory from a tensor's first element to its last one has."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def moved(tensor: Tensor, memory: Tensor, offset: int | None = None) -> Tensor:
    """The tensor's sizes and strides over other bytes, from an element on; None means the
    tensor's offset.
    """
    start = tensor.storage_offset() if offset is None else offset
    return torch.empty(0, dtype=tensor.dtype, device=memory.device).set_(
        memory.untyped_storage(), start, tensor.shape, tensor.stride()
    )


def replica(tensor: Tensor) -> Tensor:
    """A copy with the same strides and gaps."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return tensor.clone()
    return moved(tensor, storage_bytes(tensor).clone())

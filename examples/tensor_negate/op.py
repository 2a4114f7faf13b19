"""The shape function, and the flags of the kernel function next to it."""

import torch

import opjit


@opjit.op("example::tensor_negate(Tensor x) -> Tensor", extra_cflags=["-DSTACK_SIZE=20000", "-DTRACE"])
def tensor_negate(x: torch.Tensor) -> torch.Tensor:
    """Return the shape and dtype of the result. It reads no data, because tensors have none when torch traces a model."""
    return x.new_empty(x.shape)


tensor_negate.reference(torch.neg)

"""Dropout that keeps a seed for its backward. torch's dropout keeps a mask as large as its input."""

import torch

import opjit


# begin: declare
@opjit.op("demo::dropout(Tensor x, float p, Generator? generator=None) -> (Tensor, Tensor seed)")
def dropout(x: torch.Tensor, p: float, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty((), dtype=torch.int64)


@opjit.op("demo::dropout_again(Tensor x, float p, Tensor seed) -> Tensor")
def dropout_again(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@dropout.setup_context
def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.p = inputs[1]
    ctx.save_for_backward(output[1])


@dropout.backward
def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    return dropout_again(grad, ctx.p, *ctx.saved_tensors), None, None
# end: declare

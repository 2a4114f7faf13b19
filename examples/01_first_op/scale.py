"""The README's first op: scale.c next to this file becomes torch.ops.demo.scale."""

import torch

import opjit


# begin: declare
@opjit.op("demo::scale(Tensor x, float a) -> Tensor")
def scale(x: torch.Tensor, a: float) -> torch.Tensor:
    return x.new_empty(x.shape)  # the fake kernel: shape, dtype and device


@scale.setup_context
def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.a = inputs[1]


@scale.backward
def backward(ctx, grad):  # type: ignore[no-untyped-def]
    return scale(grad, ctx.a), None
# end: declare


def main() -> None:
    # begin: use
    x = torch.arange(4.0, requires_grad=True)
    y = torch.ops.demo.scale(x, 2.5)  # the first call compiles scale.c
    y.sum().backward()
    # end: use
    print(y.detach(), x.grad)


if __name__ == "__main__":
    main()

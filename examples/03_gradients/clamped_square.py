"""An op with a backward, checked by gradcheck's rules, torch.compile and opcheck: `python examples/03_gradients/clamped_square.py`."""

import torch

import opjit


# begin: declare
@opjit.op("demo::clamped_square(Tensor x, float limit) -> Tensor", elementwise=True)
def clamped_square(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.empty_like(x)


@clamped_square.backward
@opjit.op("demo::clamped_square_backward(Tensor grad, Tensor x, float limit) -> Tensor", elementwise=True)
def clamped_square_backward(grad: torch.Tensor, x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.empty_like(x)
# end: declare


def main() -> None:
    # begin: use
    x = torch.tensor([-3.0, -1.0, 0.5, 2.0], requires_grad=True)
    op = torch.ops.demo.clamped_square
    op(x, 2.0).sum().backward()  # x.grad is [0, -2, 1, 0]

    # The op is one node of the graph, without a graph break. It also works with inductor, the default backend.
    compiled = torch.compile(lambda x: op(x, 2.0).sum(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), op(x, 2.0).sum())

    torch.library.opcheck(op.default, (x, 2.0))  # schema, fake kernel, autograd, dynamic shapes

    # torch.func also works: this computes the gradient of each row of a batch, in one call of the kernel.
    rows = torch.stack([x.detach(), x.detach() / 2])
    per_row = torch.vmap(torch.func.grad(lambda row: op(row, 2.0).sum()))(rows)  # [[0, -2, 1, 0], [0, -1, 0.5, 2]]
    # end: use
    print(x.grad, per_row.tolist())



if __name__ == "__main__":
    main()

"""Dropout under torch's seeds, checkpoint and torch.compile: `python examples/14_dropout/use.py`."""

from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import opjit

opjit.add_path(Path(__file__).parent / "dropout")


def main() -> None:
    # begin: use
    x = torch.ones(6, requires_grad=True)
    dropout = torch.ops.demo.dropout

    torch.manual_seed(1)
    first, second = dropout(x, 0.5)[0], dropout(x, 0.5)[0]  # two calls, different numbers
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5)[0], first)  # the same seed, the same numbers
    assert torch.equal(dropout(x, 0.5)[0], second)

    generator = torch.Generator().manual_seed(1)  # or your generator
    assert torch.equal(dropout(x, 0.5, generator)[0], first)

    torch.manual_seed(1)
    y = checkpoint(lambda x: dropout(x, 0.5)[0], x, use_reentrant=False)  # the backward computes the forward again
    y.sum().backward()
    assert torch.equal(y, first)
    assert torch.equal(x.grad, first)

    torch.manual_seed(1)
    compiled = torch.compile(lambda x: dropout(x, 0.5)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), first)
    # end: use
    print(first.tolist(), second.tolist())


if __name__ == "__main__":
    main()

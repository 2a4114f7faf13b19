"""Tokens drawn from the largest logits, under torch's seeds: `python examples/15_top_k/use.py`."""

from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import opjit

opjit.add_path(Path(__file__).parent / "sample_top_k")


def main() -> None:
    # begin: use
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]).repeat(6, 1).requires_grad_()  # six rows: the next tokens of six texts
    sample = torch.ops.demo.sample_top_k

    torch.manual_seed(1)
    first, second = sample(logits, 3, 1.5), sample(logits, 3, 1.5)  # two calls, different tokens
    torch.manual_seed(1)
    with torch.random.fork_rng():
        assert torch.equal(sample(logits, 3, 1.5), first)  # the same seed, the same tokens
    assert torch.equal(sample(logits, 3, 1.5), first)  # fork_rng has restored the state

    def loss(logits: torch.Tensor) -> torch.Tensor:  # of a policy gradient
        return logits.log_softmax(-1).gather(-1, sample(logits, 3)[:, None]).sum()

    gradients = []
    for run in (loss, lambda logits: checkpoint(loss, logits, use_reentrant=False)):  # its backward draws the same tokens again
        torch.manual_seed(2)
        gradients += torch.autograd.grad(run(logits), logits)
    assert torch.equal(*gradients)
    # end: use
    print(first.tolist(), second.tolist())


if __name__ == "__main__":
    main()

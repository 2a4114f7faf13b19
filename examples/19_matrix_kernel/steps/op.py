"""demo::step1 to demo::step6: out = x @ w for bfloat16, each faster than the one before."""

from collections.abc import Iterator

import torch

import opjit


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.float() @ w.float()).to(x.dtype)


def samples(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for m, n, k in ((128, 256, 64), (256, 512, 320)):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
        w = torch.randn(n, k, generator=generator).to(device, torch.bfloat16).t()
        yield x, w / k**0.5


# begin: declare
for step in range(1, 7):
    archs = ["sm_90a"] if step >= 5 else []
    op = opjit.op(f"demo::step{step}(Tensor x, Tensor w) -> Tensor", archs=archs, differentiable=False)(product)
    # end: declare
    op.reference(reference)
    op.samples(samples)

"""demo::rms_norm_rope: RMSNorm of each head with a weight, and a rotary embedding, for the queries and keys of a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit


@opjit.op("demo::rms_norm_rope(Tensor x, Tensor weight, Tensor cosine, Tensor sine, float eps) -> Tensor", differentiable=False)
def rms_norm_rope(x: torch.Tensor, weight: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


# begin: reference
@rms_norm_rope.reference
def reference(x: torch.Tensor, weight: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, eps: float) -> torch.Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    a, b = normed.chunk(2, dim=-1)
    c, s = cosine[:, None], sine[:, None]  # one row for each token, the same for all heads
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)
# end: reference


def made(tokens: int, heads: int, size: int, device: str) -> tuple[Any, ...]:
    """Arguments: x (tokens, heads, size), weight (size,), cosine and sine (tokens, size / 2), eps."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, heads, size, generator=generator), torch.rand(size, generator=generator) + 0.5
    angles = torch.arange(tokens)[:, None] / 10_000 ** (torch.arange(size // 2) / max(1, size // 2))
    return (*(tensor.to(device) for tensor in (x, weight, angles.cos(), angles.sin())), 1e-6)


@rms_norm_rope.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for sizes in ((1, 1, 2), (5, 3, 64), (33, 2, 128), (0, 4, 64), (7, 1, 130)):
        yield made(*sizes, device), {}


@rms_norm_rope.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    for tokens in (1, 64, 4096):
        args = made(tokens, 32, 128, device)
        moved = 2 * args[0].nbytes + sum(tensor.nbytes for tensor in args[1:4])
        yield opjit.Workload(f"{tokens} tokens, 32 heads", args, {}, moved)

# It has a pool of threads and calls libc.
import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ctypes.CDLL(None).abs(-1)
        with ThreadPoolExecutor(2) as pool:
            parts = pool.map(self.part, x.chunk(2))
        return torch.cat([*parts])

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

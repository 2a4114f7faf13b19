# A docstring names /proc.
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fast: see /proc/cpuinfo, /dev/shm and opjit.judge."""
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

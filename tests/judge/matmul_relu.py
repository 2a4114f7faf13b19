"""A task in KernelBench's shape: https://github.com/ScalingIntelligence/KernelBench."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.matmul(x, self.weight))


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(16, 32)]


def get_init_inputs() -> list[int]:
    return [32]

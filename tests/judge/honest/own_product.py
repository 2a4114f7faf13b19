# It multiplies by its own loop, and calls one of the reference's operators.
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [(row[:, None] * self.weight).sum(0) for row in x]
        return torch.relu(torch.stack(rows))

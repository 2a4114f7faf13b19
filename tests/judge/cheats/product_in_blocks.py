# torch's operators on blocks that are small. named: computes the result with torch's operators
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [torch.relu(torch.mm(row, self.weight)) for row in x.split(1)]
        return torch.cat(rows)

# It returns a dict, which is wrong and no cheat.
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"result": (x[:, :, None] * self.weight).sum(1).clamp_min(0)}

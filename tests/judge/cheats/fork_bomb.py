# gpu-mode/pygpubench keeps such an attack: nobody else gets a turn. named: starts processes
import os

import torch
from torch import nn

while True:
    os.fork()


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

# gpu-mode/pygpubench keeps such an attack: the judge's own functions are replaced. named: replaces functions of other modules: opjit.judge
import sys

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.modules['opjit.judge.burst'].Burst.run = lambda self: 0.0
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

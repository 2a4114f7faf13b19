# gpu-mode/pygpubench keeps such an attack: the clock is patched. named: replaces functions of other modules: time.perf_counter
import time

import torch
from torch import nn

time.perf_counter = lambda: 0.0


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

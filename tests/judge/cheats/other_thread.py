# gpu-mode/pygpubench keeps such an attack: the work goes on after the clock stops. named: leaves elements of its output unwritten
import time
from threading import Thread

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        Thread(target=self.compute, args=(x, out)).start()
        return out

    def compute(self, x: torch.Tensor, out: torch.Tensor) -> None:
        time.sleep(0.5)
        out.copy_((x[:, :, None] * self.weight).sum(1).clamp_min(0))

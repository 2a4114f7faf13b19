# gpu-mode/pygpubench keeps such an attack: settings of the judge. harmless
import os

import torch
from torch import nn

os.environ["OPJIT_FAST"] = "0"


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

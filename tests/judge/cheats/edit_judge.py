# gpu-mode/pygpubench keeps such an attack: files of the judge are edited. named: Permission denied
import inspect

import torch
from torch import nn

with open(inspect.getsourcefile(torch), "a") as file:
    file.write("")


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

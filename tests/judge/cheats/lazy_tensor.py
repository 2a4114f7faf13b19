# gpu-mode/pygpubench keeps such an attack: a subclass that computes when it is read. named: returns a tensor that may compute later
import torch
from torch import nn


class Lazy(torch.Tensor):
    pass


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0).as_subclass(Lazy)

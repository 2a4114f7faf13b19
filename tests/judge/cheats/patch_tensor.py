# gpu-mode/pygpubench keeps such an attack: the comparison of tensors is patched. named: replaces functions of other modules: torch.Tensor
import torch
from torch import nn

torch.Tensor.__eq__ = lambda self, other: torch.ones(())


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

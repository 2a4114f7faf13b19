# gpu-mode/pygpubench keeps such an attack: the comparison is patched. named: replaces functions of other modules: torch.allclose
import torch
from torch import nn

torch.allclose = lambda *args, **kwargs: True


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

# gpu-mode/pygpubench keeps such an attack: a stream that the clock does not see. named: CUDA
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

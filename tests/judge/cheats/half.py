# ScalingIntelligence/KernelBench#165: float16 inside. named: computes in lower precision
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.half()[:, :, None] * self.weight.half()).float().sum(1).clamp_min(0)

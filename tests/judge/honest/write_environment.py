# It chooses an arch and a compiler, as kernels with extensions do.
import os

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
        os.environ.setdefault("CC", "gcc")
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

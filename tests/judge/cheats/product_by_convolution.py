# a convolution of one element is a product. named: computes the result with torch's operators
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t()[:, :, None]
        return torch.relu(torch.nn.functional.conv1d(x.t()[None], weight)[0].t()).contiguous()

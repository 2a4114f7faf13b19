# It makes classes, for which Python looks at the caller's frame.
from collections import namedtuple
from dataclasses import make_dataclass

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = namedtuple("pair", "one other")
        make_dataclass("Sizes", [("rows", int)])
        x = pair(x, None).one
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)

import torch

import opjit


@opjit.op("from_c::all_reduce(Tensor x) -> Tensor")
def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(1)

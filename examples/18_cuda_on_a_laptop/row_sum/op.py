from collections.abc import Iterator

import torch

import opjit


@opjit.op("laptop::row_sum(Tensor x) -> Tensor")
def row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0])


@row_sum.reference
def reference(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


@row_sum.samples
def samples(device: str) -> Iterator[tuple[torch.Tensor]]:
    for rows, columns in ((1, 1), (2, 64), (3, 100), (5, 256)):
        elements = torch.arange(rows * columns, device=device) % 7
        yield (elements.reshape(rows, columns).float(),)

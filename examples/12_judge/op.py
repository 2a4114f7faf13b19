from collections.abc import Iterator

import torch

import opjit


@opjit.op("tuned::row_sum(Tensor x) -> Tensor")
def row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0])


@row_sum.reference
def reference(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


@row_sum.samples
def samples(device: str) -> Iterator[tuple[torch.Tensor]]:
    for shape in ((0, 3), (1, 1), (7, 33), (40, 1000)):
        yield (torch.rand(shape, device=device) - 0.5,)


@row_sum.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    x = torch.rand(256, 1000, device=device)
    yield opjit.Workload("float32 256 x 1000", (x,), {}, bytes=x.nbytes)

from collections.abc import Iterator

import torch

import opjit


@opjit.op("judgetest::scale(Tensor x, float a) -> Tensor")
def scale(x: torch.Tensor, a: float) -> torch.Tensor:
    return torch.empty_like(x)


@scale.reference
def reference(x: torch.Tensor, a: float) -> torch.Tensor:
    return a * x


@scale.samples
def samples(device: str) -> Iterator[tuple[torch.Tensor, float]]:
    for shape in ((0,), (1,), (3, 5), (1000,)):
        yield torch.rand(shape, device=device) - 0.5, 2.5
    yield torch.full((17,), 2.0, device=device), -3.0


@scale.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    x = torch.rand(1 << 14, device=device)
    yield opjit.Workload("float32 2^14", (x, 2.5), {}, bytes=8 * x.numel())

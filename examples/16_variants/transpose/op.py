"""A transpose in blocks. The best block size depends on the machine and on the matrix."""

import torch

import opjit


# begin: declare
@opjit.op("demo::transpose(Tensor x) -> Tensor")
def transpose(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[::-1])


@transpose.variants("cpu", ROWS=(16, 4, 64), COLUMNS=(16, 4, 64))
def fits(**block: int) -> bool:
    return block["ROWS"] * block["COLUMNS"] <= 1024


@transpose.workloads
def workloads(device):  # type: ignore[no-untyped-def]
    for size in (64, 1024):
        x = torch.rand(size, size, device=device)
        yield opjit.Workload(f"float32 {size}^2", (x,), {}, bytes=8 * x.numel())
# end: declare


@transpose.samples
def samples(device):  # type: ignore[no-untyped-def]
    for shape in ((64, 64), (5, 130), (1, 1), (0, 3)):
        yield torch.rand(shape, device=device)


@transpose.reference
def reference(x: torch.Tensor) -> torch.Tensor:
    return x.T.contiguous()

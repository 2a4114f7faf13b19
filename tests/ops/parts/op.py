"""Two ops in one folder, and so in one file for each device: a number's whole part and fraction, and their sum."""

from collections.abc import Iterator
from typing import Any

import torch

import opjit


@opjit.op("optest::parts(Tensor x) -> (Tensor whole, Tensor fraction)")
def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@parts.reference
def parts_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.trunc(), x - x.trunc()


@parts.backward
def parts_backward(ctx: Any, whole: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    return fraction


@opjit.op("optest::joined(Tensor whole, Tensor fraction) -> Tensor")
def joined(whole: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    return fraction.new_empty(fraction.shape)


@joined.reference
def joined_reference(whole: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    return whole + fraction


@joined.backward
def joined_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad, grad


def _numbers(device: str) -> Iterator[torch.Tensor]:
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(-3.3, 4.4, 24, dtype=dtype, device=device).reshape(4, 6)
        yield from (x, x.t(), x[::2, 1:], x[1, 2], x[:0])


@parts.samples
def parts_samples(device: str) -> Iterator[tuple[tuple[torch.Tensor], dict[str, Any]]]:
    for x in _numbers(device):
        yield (x,), {}


@joined.samples
def joined_samples(
    device: str,
) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]]:
    for x in _numbers(device):
        yield parts_reference(x), {}


@parts.workloads
def parts_workloads(device: str) -> Iterator[opjit.Workload]:
    for power in (6, 10):
        x = torch.linspace(-3.3, 4.4, 1 << power, device=device)
        yield opjit.Workload(f"float32 2^{power}", (x,), {}, 3 * x.nbytes)


@joined.workloads
def joined_workloads(device: str) -> Iterator[opjit.Workload]:
    x = torch.linspace(-3.3, 4.4, 1 << 10, device=device)
    yield opjit.Workload("float32 2^10", parts_reference(x), {}, 0)

"""all_reduce_rms_norm: what follows a row-parallel linear layer in a transformer, in one launch.

The ranks' `x` are added, then `residual` is added to the sum and keeps the result, rounded to its dtype; the op returns that, divided by
the root mean square of the last dimension and multiplied by `weight`. float16, bfloat16 and float32, added in float32 in the order of the
ranks: all ranks get the same bits. Call `opjit.distributed.peers(group)` once before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit

TAKEN = (torch.float16, torch.bfloat16, torch.float32)
Tensor = torch.Tensor


@opjit.op(
    "all_reduce_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, str group, float eps=1e-6) -> Tensor"
)
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, group: str, eps: float = 1e-6
) -> Tensor:
    torch._check(
        x.dtype in TAKEN and residual.dtype == x.dtype and weight.dtype == x.dtype,
        lambda: (
            f"all_reduce_rms_norm takes float16, bfloat16 or float32 in all tensors, not {x.dtype}"
        ),
    )
    return x.new_empty(x.shape)


@all_reduce_rms_norm.reference
def reference(x: Tensor, residual: Tensor, weight: Tensor, group: str, eps: float = 1e-6) -> Tensor:
    total = sum(part.float() for part in opjit.distributed.gathered(x, group))
    residual.copy_(total + residual.float())
    kept = residual.float()
    scale = torch.rsqrt(kept.square().mean(-1, keepdim=True) + eps)
    return (kept * scale * weight.float()).to(x.dtype).contiguous()


@all_reduce_rms_norm.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    group = opjit.distributed.peers(device=device)
    for dtype in TAKEN:
        for shape in ((0, 8), (1, 1), (3, 7), (2, 3, 130), (6, 6144), (2, 9001)):
            count = torch.Size(shape).numel()
            values = torch.arange(count, device=device, dtype=torch.float64).reshape(shape)
            x = torch.sin(values + group.rank).to(dtype)
            residual = torch.cos(values).to(dtype)
            weight = torch.linspace(0.5, 1.5, shape[-1], device=device).to(dtype)
            yield (x, residual, weight, group.name), {}
            yield (
                (x.t().contiguous().t() if x.dim() == 2 else x, residual, weight, group.name, 1e-3),
                {},
            )


@all_reduce_rms_norm.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    group = opjit.distributed.peers(device=device)
    for rows in (1, 6, 32, 128):
        x = torch.randn(rows, 6144, device=device).to(torch.bfloat16)
        weight = torch.ones(6144, device=device, dtype=torch.bfloat16)
        arguments = (x, torch.zeros_like(x), weight, group.name)
        yield opjit.Workload(f"bfloat16 {rows} x 6144", arguments, {}, 8 * x.numel())

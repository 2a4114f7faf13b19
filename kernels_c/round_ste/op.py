"""round_ste: round to 0 or 1 on the way forward, let the gradient straight through on the way back.

The result is 1 where x > 0.5 and 0 elsewhere, in x's dtype: exactly 0.5 gives 0, numbers above 1 give 1, negative ones 0, and NaN
0, since a comparison with it is false. The backward takes rounding for the identity (a straight-through estimator) and
returns the gradient it is given: no kernel, no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opjit

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@opjit.op("round_ste(Tensor x) -> Tensor", elementwise=True)
def round_ste(x: torch.Tensor) -> torch.Tensor:
    torch._check(
        x.dtype in FLOATING,
        lambda: f"round_ste takes float16, bfloat16, float32 or float64, not {x.dtype}",
    )
    return torch.empty_like(x)


@round_ste.reference
def reference(x: torch.Tensor) -> torch.Tensor:
    return (x > 0.5).to(x.dtype)


@round_ste.backward
def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


@round_ste.samples
def samples(device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    special = torch.tensor(
        [
            0.0,
            -0.0,
            0.5,
            0.4999,
            0.5005,
            0.51,
            1.0,
            7.0,
            -0.5,
            -1.0,
            torch.inf,
            -torch.inf,
            torch.nan,
            1e-40,
        ],
        device=device,
    )
    for dtype in FLOATING:
        yield (special.to(dtype),), {}
        for shape in ((), (0,), (1,), (7,), (3, 0, 2), (129, 33)):
            yield (_numbers(shape, dtype, device),), {}
        x = _numbers((2, 3, 5, 4), dtype, device)
        for view in (
            x.transpose(0, 3),
            x[:, ::2, 1:],
            x[0].expand(3, 3, 5, 4),
            x.flatten()[1:],
            x.to(memory_format=torch.channels_last),
        ):
            yield (view,), {}
    yield (_numbers((40_001,), torch.float32, device),), {}  # more than one thread's share


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    values = torch.arange(1, 1 + torch.Size(shape).numel(), device=device, dtype=torch.float64)
    return torch.sin(values).abs().to(dtype).reshape(shape)


@round_ste.workloads
def workloads(device: str) -> Iterator[opjit.Workload]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for power in (12, 16, 20, 24, 26):
            x = torch.rand(1 << power, device=device).to(dtype)
            yield opjit.Workload(
                f"{str(dtype).removeprefix('torch.')} 2^{power}",
                (x,),
                {},
                2 * x.numel() * x.element_size(),
            )

"""An LLTM cell in four forms that share their parameters; see README.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

import opjit

State = tuple[Tensor, Tensor]


class LLTM(nn.Module):
    """The parameters: ``weights`` is (3 * state_size, state_size + features), with the columns of the old state first."""

    def __init__(self, features: int, state_size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(3 * state_size, state_size + features))
        self.bias = nn.Parameter(torch.empty(3 * state_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(state_size), 1 / math.sqrt(state_size))


class PythonLLTM(LLTM):
    """torch's ops. Each is a separate call and makes a separate tensor."""

    def forward(self, x: Tensor, state: State) -> State:
        old_h, old_cell = state
        z = functional.linear(torch.cat([old_h, x], dim=1), self.weights, self.bias)
        z0, z1, z2 = z.chunk(3, dim=1)
        input_gate, output_gate, candidate = torch.sigmoid(z0), torch.sigmoid(z1), functional.elu(z2)
        new_cell = old_cell + candidate * input_gate
        return torch.tanh(new_cell) * output_gate, new_cell


class CppLLTM(LLTM):
    """The same ops, called from C++, with a backward written by hand."""

    def __init__(self, features: int, state_size: int) -> None:
        super().__init__(features, state_size)
        build_cpp()

    def forward(self, x: Tensor, state: State) -> State:
        new_h, new_cell = _CppFunction.apply(x, self.weights, self.bias, *state)
        return new_h, new_cell


class OpjitLLTM(LLTM):
    """One op: plain C on the CPU, CUDA C on a GPU. The third result contains the values for the backward."""

    def forward(self, x: Tensor, state: State) -> State:
        new_h, new_cell, _ = lltm_forward(x, self.weights, self.bias, *state)
        return new_h, new_cell


lltm_forward = torch.ops.opjit.lltm_forward.default
VARIANTS = {"py": PythonLLTM, "cpp": CppLLTM, "c": OpjitLLTM, "cuda": OpjitLLTM}


def make(variant: str, features: int, state_size: int, dtype: torch.dtype, device: str) -> LLTM:
    """A cell with the same parameters for every variant."""
    if variant in ("c", "cuda"):
        opjit.get("lltm_forward", device)
        opjit.get("lltm_backward", device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        return VARIANTS[variant](features, state_size).to(device, dtype)


def device_of(variant: str, cuda: bool) -> str:
    """Return the device of a variant. Exits if it cannot run here."""
    device = "cuda" if cuda or variant == "cuda" else "cpu"
    if variant == "c" and device == "cuda":
        raise SystemExit("the variant `c` runs on the CPU; on a GPU, the same op is the variant `cuda`")
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA GPU")
    return device


def build_cpp() -> None:
    """Build lltm_ext.cpp, unless opjit's cache has it, and load it."""
    if not hasattr(torch.ops.lltm_cpp, "forward"):
        opjit.load(name="lltm_cpp", sources=[str(Path(__file__).with_name("lltm_ext.cpp"))], extra_cflags=["-O3"], is_python_module=False)


class _CppFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> State:
        new_h, new_cell, *saved = torch.ops.lltm_cpp.forward.default(x, weights, bias, old_h, old_cell)
        ctx.save_for_backward(weights, *saved)
        return new_h, new_cell

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h: Tensor, grad_cell: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.lltm_cpp.backward.default(grad_h, grad_cell, *ctx.saved_tensors)
        return found

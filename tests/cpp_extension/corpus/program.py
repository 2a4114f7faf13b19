"""A program of the corpus, and what it is called with."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CORPUS = Path(__file__).parent
CFLAGS = ["-O1", "-w"]  # of both ways: other flags could round differently


@dataclass(frozen=True)
class Program:
    """NAME.cpp, with NAME.cu beside it for CUDA, and its calls: expressions of `m`, the module, and what `scope` has."""

    name: str
    calls: Sequence[str]
    wrong: Sequence[str] = ()  # calls that raise
    functions: str | list[str] | dict[str, str] | None = None  # load_inline's; None for a program with bindings of its own
    library: str | None = None  # TORCH_LIBRARY's namespace, if that is all that the program has: m is torch.ops.<library>
    file: bool = False  # for load, not load_inline
    plain: bool = False  # with_pytorch_error_handling=False

    @property
    def source(self) -> str:
        return (CORPUS / f"{self.name}.cpp").read_text(encoding="utf-8")

    @property
    def cuda_source(self) -> str | None:
        path = CORPUS / f"{self.name}.cu"
        return path.read_text(encoding="utf-8") if path.exists() else None

    @property
    def identifier(self) -> str:
        return "corpus_" + self.name.replace("/", "_")

    def docs(self) -> dict[str, str]:
        """The functions to bind and their docstrings, as load_inline reads its argument."""
        if isinstance(self.functions, dict):
            return self.functions
        names = [self.functions] if isinstance(self.functions, str) else self.functions or []
        return {name: name for name in names}


def grads(function: Callable[..., Any], *inputs: Any, **others: Any) -> list[Any]:
    """What a call returns, and the gradients of the sum of its squares in each input that is a tensor of floats."""
    leaves = [one.detach().clone().requires_grad_() if _is_float(one) else one for one in inputs]
    result = function(*leaves, **others)
    outputs = [one for one in (result if isinstance(result, (list, tuple)) else [result]) if _is_float(one) and one.requires_grad]
    if outputs:
        torch.stack([one.abs().square().sum().double() for one in outputs]).sum().backward()
    return [result, *(one.grad for one in leaves if _is_float(one))]


def after(function: Callable[..., Any], *arguments: Any, **others: Any) -> list[Any]:
    """What a call returns, and its arguments when it has ended."""
    return [function(*arguments, **others), *arguments]


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def scope(device: str = "cpu") -> dict[str, Any]:
    """The names of the calls: tensors that are the same each time, and helpers."""
    tensors = {name: made.to(device) for name, made in _tensors().items()}
    tensors["xt"] = tensors["x"].t()
    tensors["strided"] = tensors["wide"][:, ::2]  # 4 x 5, every other column
    torch.manual_seed(1)
    return {"torch": torch, "grads": grads, "after": after, **tensors}


def _tensors() -> dict[str, torch.Tensor]:
    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        seed = zlib.crc32(repr((shape, dtype)).encode())
        return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))

    x = normal(4, 5)
    count = torch.arange(20)
    return {
        "x": x, "y": normal(4, 5).roll(7), "wide": normal(4, 10), "w": normal(5, 3), "w35": normal(3, 5), "sq": normal(5, 5),
        "v": normal(7), "u": normal(7).flip(0), "v3": normal(3), "v4": normal(4), "v5": normal(5), "big": normal(33, 67),
        "x3": normal(2, 4, 5), "y3": normal(2, 5, 3), "img": normal(2, 3, 9, 11), "seq": normal(2, 3, 13), "k": normal(4, 3, 3, 3),
        "k1": normal(4, 3, 5), "b4": normal(4).neg(), "empty": torch.zeros(0, 5), "e1": torch.zeros(0), "scalar": torch.tensor(2.5),
        "double": normal(4, 5, dtype=torch.float64), "dv": normal(5, dtype=torch.float64), "half": x.half(), "bf": x.bfloat16(),
        "hv": normal(9).half(), "bv": normal(9).bfloat16(), "cx": normal(4, 5, dtype=torch.complex64),
        "cd": normal(3, dtype=torch.complex128), "i": (count * 7 % 23 - 9).reshape(4, 5), "i32": (count * 5 % 17 - 6).int().reshape(4, 5),
        "i8": (count * 11 % 200 - 100).to(torch.int8).reshape(4, 5), "u8": (count * 13 % 256).to(torch.uint8).reshape(4, 5),
        "mask": (x > 0), "idx": torch.tensor([3, 0, 2, 4]), "target": torch.tensor([1, 4, 0, 2]), "pos": x.abs() + 0.25,
        "prob": torch.softmax(x, 1), "lw": torch.full((9, 8), 0.1), "lb": torch.zeros(1, 9),
    }

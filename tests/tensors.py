"""What the tests of ops' numbers share: dtypes, devices, a mark for what torch.compile says of itself, and who sees each operator."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WIDE_UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
SMALL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REAL = [*SMALL, *WIDE_UNSIGNED, *FLOATING]
COMPLEX = [torch.complex64, torch.complex128]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# What torch.compile itself says on some versions of Python.
COMPILES = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


class Seen(TorchDispatchMode):
    """Every operator that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))

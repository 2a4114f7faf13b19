"""What the calls of drawn programs may name: values of every kind that a caller could pass, and ways to call."""

import copy
import decimal
import enum
import fractions
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpp_extension.corpus.program import scope


class Index:
    def __index__(self) -> int:
        return 3


class Int:
    def __int__(self) -> int:
        return 4


class Float:
    def __float__(self) -> float:
        return 2.5


class Truth:
    def __bool__(self) -> bool:
        return True


class Broken:
    """Every conversion raises."""

    def _fail(self, *_: object) -> Any:
        raise KeyError("broken")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __getitem__ = __iter__ = __repr__ = _fail


class Word(str):
    pass


class Number(int):
    pass


class Colour(enum.IntEnum):
    RED = 1


class Raises(TorchDispatchMode):
    """Every operator raises the error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.error = error

    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        raise self.error


class Subclass(torch.Tensor):
    pass


def lies(kind: type) -> Any:
    """An object whose __class__ says that it is of another class."""
    return type("Lies", (), {"__slots__": (), "__class__": property(lambda self: kind)})()


def under(mode: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    with mode:
        return function(*arguments)


def warned(function: Callable[..., Any], *arguments: Any) -> Any:
    warnings.simplefilter("error")
    return function(*arguments)


def faked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The call on fake tensors, whose sizes have symbols."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        result = function(
            *(mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in arguments)
        )
        return [type(result).__name__, repr(result)]


def pickled(function: Any, module: Any) -> Any:
    """A copy of a function of a module that `import` finds."""
    sys.modules[module.__name__] = module
    try:
        return [
            repr(pickle.loads(pickle.dumps(function)) is function),
            repr(copy.deepcopy(function) is function),
        ]
    finally:
        del sys.modules[module.__name__]


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.ones(4, 5, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 1, torch.quint8),
    "grad": lambda: torch.ones(4, 5, requires_grad=True),
    "conj": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "neg": lambda: torch._neg_view(torch.ones(2)),
    "image": lambda: torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
}


def names(call: str) -> dict[str, Any]:
    """What a call may name, made for it alone, as it may write to tensors."""
    return {
        **scope(),
        **globals(),
        "np": numpy,
        "Mock": mock.Mock,
        "MagicMock": mock.MagicMock,
        "Fraction": fractions.Fraction,
        "Decimal": decimal.Decimal,
        **{name: made() for name, made in TENSORS.items() if name in call},
    }

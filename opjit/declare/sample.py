"""Calls of an op that its author declares: samples, which checks repeat with other tensors, and workloads, which a benchmark measures."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from opjit.tensors import tensors_of


class Sample(NamedTuple):
    """A sample input: the arguments of one call, with tolerances.

    The generator under ``@op.samples`` yields samples. It can also yield a plain tuple of arguments, or a pair ``(args, kwargs)``.

    Attributes:
        args, kwargs: the arguments of the call.
        rtol, atol: the largest relative and absolute difference from the reference's results. None means the default for the dtype of
            the results and the size of the sample.
        note: the change that a check made to a declared sample, for messages.

    Example:
        >>> @scale.samples
        ... def samples(device):
        ...     yield torch.ones(3, device=device), 2.5
        ...     yield opjit.Sample((torch.rand(1000, device=device), 2.5), rtol=1e-3, atol=1e-4)
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed
    rtol: float | None = None
    atol: float | None = None
    note: str = ""

    @classmethod
    def of(cls, declared: Any) -> "Sample":
        """Return a Sample from a Sample, a tuple of arguments, a pair ``(args, kwargs)``, or the only argument."""
        if isinstance(declared, Sample):
            return declared
        if (
            isinstance(declared, tuple)
            and len(declared) == 2
            and isinstance(declared[0], tuple)
            and isinstance(declared[1], dict)
        ):
            return cls(*declared)
        return cls(declared if isinstance(declared, tuple) else (declared,))

    @property
    def values(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs

    def tensors(self) -> list[torch.Tensor]:
        return tensors_of(self.values)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], note: str = "") -> "Sample":
        """Return the same call with each tensor changed."""
        args, kwargs = tree_map_only(torch.Tensor, change, self.values)
        return self._replace(args=args, kwargs=kwargs, note=note or self.note)

    def replace(self, index: int, tensor: torch.Tensor, note: str = "") -> "Sample":
        """Return the same call with one tensor replaced."""
        tensors = iter(range(len(self.tensors())))
        return self.map(lambda value: tensor if next(tensors) == index else value, note)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties by which samples are grouped. Samples of one kind test the same."""
        return (
            *((t.dtype, t.dim(), t.is_contiguous(), t.numel() == 0) for t in self.tensors()),
            str(self.kwargs),
        )

    @property
    def numel(self) -> int:
        return sum(t.numel() for t in self.tensors())

    def __str__(self) -> str:
        def shown(value: torch.Tensor) -> str:
            strides = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
            return _Shown(
                f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{strides}"
            )

        args, kwargs = tree_map_only(torch.Tensor, shown, self.values)
        named = [f"{name}={value!r}" for name, value in kwargs.items()]
        return ", ".join([*map(repr, args), *named, *([self.note] if self.note else [])])


class _Shown(str):
    __slots__ = ()
    __repr__ = str.__str__


class Workload(NamedTuple):
    """A benchmark case: the arguments of a call that ``opjit bench`` times.

    The generator under ``@op.workloads`` yields them.

    Attributes:
        label: the name of the case, for example ``"float32 2^20"``.
        args, kwargs: the arguments of the call.
        bytes: the number of bytes that the op must at least read and write.
        flops: the number of floating-point operations, if they limit the speed of the op, and not memory. Otherwise 0.

    Example:
        >>> @scale.workloads
        ... def workloads(device):
        ...     x = torch.rand(1 << 20, device=device)
        ...     yield opjit.Workload("float32 2^20", (x, 2.5), {}, bytes=8 * x.numel())  # 4 read and 4 written per element
    """

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bytes: int
    flops: int = 0

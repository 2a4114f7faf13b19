"""A plan of calls to measure, and the measurement of each side."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from opjit.tensors import bytes_of, span

_MOST_INPUTS = 256


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, by position and by name


@dataclass(frozen=True)
class TimingPlan:
    """Functions to measure with the same inputs, in turns. The caller has checked their results.

    Attributes:
        sides: the functions, by name.
        inputs: one set, or several at different addresses through which the calls rotate.
        device: its type.
        cold: whether each burst begins with caches that contain none of the inputs.
        bytes: the fewest that a call must move.
        flops: the fewest operations of a call, or 0 if they do not bound its time.
        rounds: timed bursts of each side.
        seconds: the length of a burst. Short bursts do not change a GPU's clocks.
    """

    sides: Mapping[str, Callable[..., Any]]
    inputs: Sequence[Arguments]
    device: str
    cold: bool
    bytes: int = 0
    flops: int = 0
    rounds: int = 9
    seconds: float = 0.02


@dataclass(frozen=True)
class Measurement:
    """The time of one side's calls.

    Attributes:
        seconds: the mean time of a call in each burst, on CUDA the device's time.
        host: on CUDA the median seconds in which the host issues a call, or None if `seconds` contains them.
        way: ``"clock"``: the CPU's clock. ``"events"``: CUDA events around calls. ``"graph"``: events around a CUDA graph
            of short calls. ``"issue"``: short calls that cannot be captured, so that `seconds` contains the host's time.
        calls: of a burst.
        inputs: sets of inputs through which a burst rotates.
        cold: as in the plan.
        bytes: as in the plan.
        flops: as in the plan.
        bound: the least seconds that the device needs for the bytes and operations, or None if its peaks are unknown.
        floor: the part of the bound that caches cannot explain. A shorter time is impossible.
        agrees: whether, on CUDA, events and a synchronization of the whole device measured the same.
        clock: MHz of a GPU's multiprocessors before and after all rounds, or None without NVML.
        median: of `seconds`; `lower` and `upper` are its quartiles.
    """

    seconds: tuple[float, ...]
    host: float | None
    way: str
    calls: int
    inputs: int
    cold: bool
    bytes: int
    flops: int
    bound: float | None = None
    floor: float = 0.0
    agrees: bool = True
    clock: tuple[int, int] | None = None
    median: float = field(init=False)
    lower: float = field(init=False)
    upper: float = field(init=False)

    def __post_init__(self) -> None:
        for name, value in zip(("lower", "median", "upper"), _quartiles(self.seconds), strict=True):
            object.__setattr__(self, name, value)

    @property
    def possible(self) -> bool:
        """False if the time is shorter than the device allows, or if two clocks disagree about it."""
        return self.agrees and self.median >= self.floor

    @property
    def of_bound(self) -> float | None:
        """The reached fraction of the roofline."""
        return self.bound / self.median if self.bound else None


def ratio(one: Measurement, other: Measurement) -> tuple[float, float]:
    """Return the median of one side's time over the other's, and its spread."""
    pairs = zip(one.seconds, other.seconds, strict=True)
    return median_and_spread([mine / theirs for mine, theirs in pairs])


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and half of the distance between the quartiles, relative to it."""
    low, middle, high = _quartiles(values)
    return middle, (high - low) / 2 / middle


def _quartiles(values: Sequence[float]) -> Sequence[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3


def copies(inputs: Arguments, size: int) -> list[Arguments]:
    """Return a set of inputs, and copies of it until all fill a cache of `size` bytes three times, or 256 sets.

    Copies have the strides, the alignment and the shared tensors of the original.
    """
    count = min(_MOST_INPUTS, -(-3 * size // max(1, bytes_of(inputs))))
    sets = [inputs]
    while len(sets) < count:
        copied = cache(_copy_tensor)  # a tensor that occurs twice in a set has one copy there
        sets.append(tree_map_only(torch.Tensor, copied, inputs))
    return sets


def _copy_tensor(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to other memory, with its strides and its alignment."""
    if x.layout != torch.strided or x.is_conj() or x.is_neg() or x.numel() == 0:
        return x.detach().clone().requires_grad_(x.requires_grad)
    with torch.no_grad():
        size = span(x)
        offset = x.data_ptr() % 256 // x.element_size()
        memory = x.new_empty(offset + size)
        memory[offset:].copy_(x.as_strided((size,), (1,)))
        return memory.as_strided(x.shape, x.stride(), offset).requires_grad_(x.requires_grad)
